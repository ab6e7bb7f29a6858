"""Files appear whole or not at all."""

import errno
import os
import shutil
import signal
import stat
import subprocess

import pytest

from bitwright.errors import ConfigError
from bitwright.files import atomic_write, check_output, scratch_folder, scratch_path


def test_a_file_appears_when_all_went_well(tmp_path):
    target = tmp_path / "new" / "folder" / "model.onnx"
    with atomic_write(target) as partial:
        assert partial.parent == target.parent
        assert partial.suffix == ".onnx"
        partial.write_text("first")
        assert not target.exists()
    assert target.read_text() == "first"
    with atomic_write(str(target)) as partial:
        partial.write_text("second")
        assert target.read_text() == "first"
    assert target.read_text() == "second"
    assert os.listdir(target.parent) == ["model.onnx"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_nothing(tmp_path, error, existing):
    target = tmp_path / "report.html"
    if existing:
        target.write_text("old")

    def fail():
        with atomic_write(target) as partial:
            partial.write_text("half of it")
            raise error

    with pytest.raises(error):
        fail()
    assert os.listdir(tmp_path) == (["report.html"] if existing else [])
    if existing:
        assert target.read_text() == "old"


def test_the_writer_may_remove_its_file(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "x.bin") as partial:
        partial.unlink()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        with atomic_write(tmp_path / "x.txt") as partial:
            partial.write_text("x")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.txt").stat().st_mode) == mode


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with atomic_write("here.txt") as partial:
        partial.write_text("x")
    assert os.listdir(tmp_path) == ["here.txt"]


def test_check_output_names_what_is_wrong(tmp_path):
    (tmp_path / "file").write_text("x")
    assert check_output(tmp_path / "a" / "b" / "c.onnx") == tmp_path / "a" / "b" / "c.onnx"
    assert check_output(tmp_path / "file") == tmp_path / "file"
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        check_output(tmp_path)
    with pytest.raises(ConfigError, match="file' exists already; choose another name or allow overwriting"):
        check_output(tmp_path / "file", overwrite=False)
    with pytest.raises(ConfigError, match=r"cannot be written: .*file' is not a folder"):
        check_output(tmp_path / "file" / "model.onnx")
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_read_only_folder_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "old.onnx").write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for name in ("new.onnx", "old.onnx", "sub/new.onnx"):
        with pytest.raises(ConfigError, match=f"{name}' cannot be written: .* is read-only"):
            check_output(tmp_path / name)
        with pytest.raises(ConfigError, match="is read-only"), atomic_write(tmp_path / name):
            pytest.fail("nothing may be done")
    assert os.listdir(tmp_path) == ["old.onnx"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_our_own_error_and_leaves_nothing(tmp_path, number):
    def fill():
        with atomic_write(tmp_path / "a" / "b" / "model.onnx") as partial:
            partial.write_text("half of it")
            raise OSError(number, os.strerror(number))

    with pytest.raises(ConfigError, match=rf"model.onnx' cannot be written: {os.strerror(number)}"):
        fill()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_at_the_first_byte(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("bitwright.files.os.open", full)
    with pytest.raises(ConfigError, match="No space left"), atomic_write(tmp_path / "new" / "m.onnx"):
        pytest.fail("nothing may be done")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "y" * 256 + "/m.onnx", "zero\0byte.onnx"])
def test_names_that_cannot_be(tmp_path, name):
    with pytest.raises(ConfigError, match=r"the output .* cannot be written: ") as caught:
        check_output(tmp_path / name)
    assert len(str(caught.value)) < 1000
    with pytest.raises(ConfigError), atomic_write(tmp_path / name):
        pytest.fail("nothing may be done")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["n" * 250 + ".onnx", "n." + "o" * 250, "ünï ∂.onnx", "-o", "a\nb", " "])
def test_odd_names_that_can_be(tmp_path, name):
    with atomic_write(tmp_path / name) as partial:
        partial.write_text("x")
    assert os.listdir(tmp_path) == [name]


def test_only_regular_files_are_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to_folder").symlink_to("folder")
    for name in ("pipe", "link"):
        with pytest.raises(ConfigError, match="is a device, pipe or socket, not a regular file"):
            check_output(tmp_path / name)
    with pytest.raises(ConfigError, match="is a link that leads to itself"):
        check_output(tmp_path / "loop")
    with pytest.raises(ConfigError, match="is a folder"):
        check_output(tmp_path / "to_folder")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("existing", [True, False])
def test_links_are_followed_and_stay(tmp_path, existing):
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real.onnx", tmp_path / "link.onnx"
    if existing:
        real.write_text("old")
    link.symlink_to(real)
    with atomic_write(link) as partial:
        partial.write_text("new")
        assert partial.parent == real.parent
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert os.listdir(real.parent) == ["real.onnx"]


def test_what_a_killed_process_left_is_removed_by_the_next_writer(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours = scratch_path(tmp_path).name
    dead = f".bitwright-{ours.split('-')[1]}-{gone.pid}-"
    old = {"folder": f"{dead}00000000", "file": f"{dead}00000001.onnx"}
    far = {"old": ".bitwright-ffffffff-1-00000000", "new": ".bitwright-ffffffff-1-00000001"}
    foreign = [".bitwright-notes", f"{dead}xyz", f"{dead[1:]}00000000"]
    (tmp_path / old["folder"]).mkdir()
    (tmp_path / old["folder"] / "model.safetensors").write_text("half")
    for name in (ours, old["file"], *far.values(), *foreign):
        (tmp_path / name).write_text("half")
    os.utime(tmp_path / far["old"], (1e9, 1e9))
    with atomic_write(tmp_path / "x.txt") as partial:
        partial.write_text("x")
    assert sorted(os.listdir(tmp_path)) == sorted(["x.txt", ours, far["new"], *foreign])
    with scratch_folder(tmp_path) as folder:
        (folder / "inside").write_text("x")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_the_disk_has_a_file_before_it_has_its_name(tmp_path, monkeypatch):
    """Otherwise a crash of the machine can leave the name without the content."""
    target, done = tmp_path / "x.txt", []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("replaced"), replace(*names)))
    with atomic_write(target) as partial:
        partial.write_text("x")
    assert done == [str(partial), "replaced", str(tmp_path)]


def test_an_interrupted_clean_up_is_finished(tmp_path, monkeypatch):
    """The signal comes while the folder is being removed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    removed, whole = [], shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *given, **options: removed.append(signal.raise_signal(signal.SIGINT)))
    try:
        with pytest.raises(KeyboardInterrupt), scratch_folder(tmp_path) as folder:
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert removed == [None]  # and not by an exception in the middle of it
    whole(folder)


def test_a_folder_that_takes_no_files(tmp_path):
    with pytest.raises(ConfigError, match=r"no files can be made in .*nowhere'"), scratch_folder(tmp_path / "nowhere"):
        pytest.fail("nothing may be done")


def test_threads_that_write_leave_the_umask_alone(tmp_path, monkeypatch):
    """Whoever asks for it also sets it, for all threads."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))
    with atomic_write(tmp_path / "x.txt") as partial:
        partial.write_text("x")
    assert (tmp_path / "x.txt").read_text() == "x"
