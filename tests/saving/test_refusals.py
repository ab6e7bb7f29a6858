"""What does not fit is refused by name, never with a raw error, and nothing half-written is left."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.checkpoints import Checkpoint
from bitwright.errors import BitwrightError, ConfigError, SaveError
from bitwright.saving.folder import _put
from bitwright.saving.manifest import _digest
from tests.saving.nets import IMAGES, TOKENS, Small, Tokens, calibrated, outputs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    return bw.save(calibrated(), tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "m"))


def edit(folder, **changes):
    """Change the manifest as someone would who knows about its digest."""
    file = folder / "bitwright.json"
    data = {**json.loads(file.read_text()), **changes}
    data.pop("digest")
    file.write_text(json.dumps({"digest": _digest(data), **data}))
    return data


def test_a_folder_without_a_model(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SaveError, match=r"is not a saved model: it has no bitwright\.json"):
            bw.load(path, Small)


def test_another_version(folder):
    edit(folder, format=2)
    with pytest.raises(SaveError, match=r"has the format 2, and Bitwright .* reads 1.*Bitwright 0\.1"):
        bw.load(folder, Small)


@pytest.mark.parametrize("name", ["bitwright.json", "recipe.yaml", "model.safetensors"])
def test_edited_truncated_and_missing_files(folder, name):
    file = folder / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(SaveError, match=name):
        bw.load(folder, Small)
    file.write_bytes(whole[:-9] + b"12345678" + whole[-1:])
    with pytest.raises(SaveError, match=name):
        bw.load(folder, Small)
    file.unlink()
    with pytest.raises(SaveError, match=name):
        bw.load(folder, Small)


def test_another_model(folder):
    class Other(Small):
        def forward(self, x):
            return super().forward(x).relu()

    with pytest.raises(SaveError, match=r"holds a Small that differs from what this Other becomes.*relu"):
        bw.load(folder, Other)
    with pytest.raises(SaveError, match=r"the Linear given cannot be prepared as the saved Small was.*float32"):
        bw.load(folder, nn.Linear(3, 3))


def test_other_settings_and_shapes(folder):
    def strided():
        model = Small()
        model.depthwise.padding = model.depthwise.dilation = (2, 2)
        return model

    def wider():
        model = Small()
        model.tied = nn.Linear(8, 9)
        return model

    with pytest.raises(SaveError, match=r"was 'depthwise: .*padding=\(1, 1\).*is now .*padding=\(2, 2\)"):
        bw.load(folder, strided)
    with pytest.raises(SaveError, match=r"out_features=8.*out_features=9.*the folder lacks tied\.weight"):
        bw.load(folder, wider)


def test_another_type_of_weights(folder):
    with pytest.raises(SaveError, match="double"):
        bw.load(folder, lambda: Small().double())


def test_a_model_that_is_none(folder):
    with pytest.raises(SaveError, match="returned a int, not a"):
        bw.load(folder, lambda: 7)
    with pytest.raises(SaveError, match="not str"):
        bw.load(folder, "net")
    with pytest.raises(SaveError, match="is prepared already"):
        bw.load(folder, bw.prepare(Small(), IMAGES))
    with pytest.raises(ConfigError, match=r"was not made by bitwright\.prepare"):
        bw.save(Small(), folder)


def test_another_spec(folder):
    data = edit(folder)
    name = next(iter(data["quantizers"]))
    data["quantizers"][name] |= {"placed": "int3 symmetric tensor"}
    edit(folder, quantizers=data["quantizers"])
    with pytest.raises(SaveError, match=rf"the quantizer {name} was made as 'int3 symmetric tensor', but now as"):
        bw.load(folder, Small)
    data["quantizers"].pop(name)
    edit(folder, quantizers=data["quantizers"])
    with pytest.raises(SaveError, match=rf"a quantizer at {name} is new"):
        bw.load(folder, Small)


def test_inputs_that_cannot_be_made_up(tmp_path):
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, order):
            return self.fc(x)[torch.linalg.inv_ex(order).inverse.long().sum(1)]  # a permutation

    inputs = (torch.ones(2, 4), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    model = calibrated(Strict, inputs)
    bw.save(model, tmp_path / "bare")
    bw.save(model, tmp_path / "full", example=True)
    expected = model(*inputs)
    for loaded in (
        bw.load(tmp_path / "full", Strict),
        bw.load(tmp_path / "bare", Strict, example_inputs=inputs),
    ):
        assert torch.equal(loaded(*inputs), expected)
    with pytest.raises(SaveError, match=r"float32\[3, 4\], not float32\[2, 4\]"):
        bw.load(tmp_path / "bare", Strict, example_inputs=(torch.ones(3, 4), inputs[1]))
    with pytest.raises(SaveError, match="a tensor, not a tuple"):
        bw.load(tmp_path / "bare", Strict, example_inputs=inputs[0])


def test_arguments_that_are_not_plain(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, scale=None):
            return self.fc(x) * scale

    model = calibrated(Scaled, torch.ones(2, 4), concrete_args={"scale": torch.ones(())})
    with pytest.raises(SaveError, match=r"concrete_args has 'scale', a tensor"):
        bw.save(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_places_that_are_not_ours(tmp_path):
    model = calibrated()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for path, message in (("file", "something else"), ("full", "notes.txt"), ("a" * 300, "cannot be written")):
        with pytest.raises(SaveError, match=message):
            bw.save(model, tmp_path / path)
    with pytest.raises(SaveError, match="cannot be written"):
        bw.save(model, tmp_path / "file" / "below")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]


def test_replacing_keeps_the_old_until_the_new_is_whole(tmp_path, monkeypatch):
    target = tmp_path / "m"
    bw.save(calibrated(), target)
    before = (target / "model.safetensors").read_bytes()
    model = calibrated(Tokens, TOKENS)

    def full_disk(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("bitwright.saving.writing.save_file", full_disk)
        with pytest.raises(SaveError, match="No space left on device"):
            bw.save(model, target)
    assert (target / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    bw.save(model, target)
    assert bw.load(target, Tokens) is not None
    monkeypatch.setattr("bitwright.saving.folder.ctypes.CDLL", full_disk)  # where folders cannot be exchanged
    bw.save(calibrated(), target)
    assert bw.load(target, Small) is not None
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    resource = pytest.importorskip("resource")
    model, before = calibrated(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        with pytest.raises(SaveError, match=r"new/folder' cannot be written: .*File too large"):
            bw.save(model, tmp_path / "new/folder")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_makes_meanwhile_is_replaced(tmp_path):
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    _put(tmp_path / "mine", tmp_path / "theirs")
    assert (tmp_path / "theirs/x").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        _put(tmp_path / "theirs", tmp_path / "file")


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(folder, monkeypatch):
    """The manifest of one save and the tensors of another are not a model."""
    from bitwright.saving import reading

    torch.manual_seed(5)
    other, whole, count = calibrated(), reading._check_files, []

    def check(*given):
        count.append(1)
        if len(count) <= times:
            bw.save(other, folder)
        return whole(*given)

    monkeypatch.setattr(reading, "_check_files", check)
    times = 2
    loaded = bw.load(folder, Small)
    assert len(count) == 3
    assert torch.equal(outputs(loaded, IMAGES), outputs(other, IMAGES))
    times = 100
    with pytest.raises(SaveError, match="was replaced 10 times while it was read"):
        bw.load(folder, Small)


def test_names_that_no_file_has(tmp_path):
    model = calibrated()
    for name in ("a" * 300, "/".join(["b" * 200] * 30), "a\0b"):
        for call in (lambda path: bw.save(model, path), lambda path: bw.calibrate(model, IMAGES, checkpoint=path)):
            with pytest.raises(SaveError, match=r"cannot be") as found:
                call(f"{tmp_path}/{name}")
            assert len(str(found.value)) < 700
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["bitwright.json", "recipe.yaml", "model.safetensors"])
def test_a_pipe_in_place_of_a_file(folder, name):
    """To read it would take until someone writes."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(SaveError, match=rf"{name}' cannot be read: it is not a regular file"):
        bw.load(folder, Small)


def test_texts_that_no_terminal_takes(folder):
    edit(folder, structure=["\ud800"])
    with pytest.raises(SaveError) as caught:
        bw.load(folder, Small)
    assert r"was '\ud800'" in str(caught.value)


def test_a_warning_is_short(folder):
    edit(folder, versions={"torch": "9" * 100_000})
    with pytest.warns(bw.errors.SaveWarning, match="torch was 999") as said:
        bw.load(folder, Small)
    assert len(str(said[0].message)) < 2000


@pytest.mark.parametrize("path", [7, None, b"m"])
def test_what_is_not_a_path(path):
    with pytest.raises(SaveError, match="must be a path, not"):
        bw.load(path, Small)
    with pytest.raises(SaveError, match=r"the checkpoint .* cannot be used"):
        Checkpoint(path, "job", {})


def test_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    bw.save(calibrated(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "bitwright.json").exists()


def test_mutated_folders(folder):
    """Any change to any file is refused by one of our errors, short enough to read."""
    chance = random.Random(0)
    for number in range(60):
        file = chance.choice(sorted(folder.iterdir()))
        whole = file.read_bytes()
        at = chance.randrange(len(whole))
        changed = bytearray(whole)
        if number % 3:
            changed[at] ^= 1 << chance.randrange(8)
        else:
            changed[at : at + chance.randrange(1, 40)] = b""
        file.write_bytes(changed)
        with pytest.raises(BitwrightError) as caught:
            bw.load(folder, Small)
        assert len(str(caught.value)) < 2000
        file.write_bytes(whole)
    assert bw.load(folder, Small) is not None


def test_killed_at_random_moments():
    """A sample; ``python -m tests.saving.kills 200`` takes longer."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.saving.kills", "3"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("3 kills, "), done.stderr
    assert done.stdout.endswith("found: []\n")
