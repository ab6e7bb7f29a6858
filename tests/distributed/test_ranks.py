"""Two or four ranks do what one does on all of the data, and a rank that fails is an error on all, not a hang."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bitwright as bw
from bitwright.errors import ConfigError
from tests.distributed.jobs import (
    FREE,
    backward,
    data,
    few_bits,
    learning,
    net,
    plain,
    prepared,
    scales,
    training,
    worth,
)

ROOT = Path(__file__).parents[2]


def run(jobs, folder, world=2):
    """Run jobs on some ranks; return what each found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.distributed.jobs", jobs, str(folder)]
    ranks = [subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(rank)}) for rank in range(world)]
    try:
        for rank in ranks:
            rank.wait(timeout=300)
    finally:
        for rank in ranks:
            rank.kill()
    files = [folder / f"rank{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("calibration,measuring,qat", tmp_path_factory.mktemp("ranks"))


def test_observers_without_an_order_find_the_same_ranges_to_the_bit(found):
    for observer in FREE:
        one = scales(bw.calibrate(prepared(observer), data()))
        assert [rank["calibration"][observer] for rank in found] == [one, one]


def test_moving_averages_and_moments_agree_but_for_rounding(found):
    for observer in ("EMAMinMaxObserver", "LSQObserver"):
        one = scales(bw.calibrate(prepared(observer), data()))
        assert found[0]["calibration"][observer] == found[1]["calibration"][observer]
        for name, value in found[0]["calibration"][observer].items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(one[name]), rtol=1e-5, atol=0)


def test_a_failure_on_one_rank_is_one_on_all(found):
    here, there = (rank["calibration"] for rank in found)
    assert here["no data"].startswith(
        "CalibrationError: rank 1 failed: CalibrationError: the calibration data is empty"
    )
    assert there["no data"].startswith("CalibrationError: the calibration data is empty")
    assert here["unchanged"]
    assert there["unchanged"]
    assert "rank 1 failed: CalibrationError: calibration batch 1 produces NaN" in here["nan"]
    assert there["nan"].startswith("CalibrationError: calibration batch 1 produces NaN")
    for rank in (here, there):
        assert "the number of batches differs between ranks: 1 on rank 0, 2 on rank 1" in rank["different"]
        assert "the model differs between ranks" in rank["other weights"]


def test_uneven_shares_are_joined_where_that_is_wanted(found):
    one = scales(bw.calibrate(prepared(), [data()[0], *data()[3:5]]))
    assert [rank["calibration"]["uneven"] for rank in found] == [one, one]


def test_one_rank_writes_and_all_read(found):
    one = scales(bw.calibrate(prepared(), data()))
    assert [rank["calibration"]["loaded"] for rank in found] == [one, one]
    assert found[0]["calibration"]["file"].startswith("SaveError: the folder")
    assert found[1]["calibration"]["file"].startswith("DistributedError: rank 0 failed: SaveError: the folder")
    assert found[0]["calibration"]["exported"] == found[1]["calibration"]["exported"] != []


def test_measuring_finds_what_one_rank_finds_to_the_bit(found):
    ordered = [*data()[::2], *data()[1::2]]
    model = bw.calibrate(prepared(), [*data(2), *data(2)])
    for metric in ("kl", "mse", "sqnr"):
        one = worth(bw.sensitivity(model, ordered, metric))
        assert [rank["measuring"][metric] for rank in found] == [one, one]
    scored = [worth(bw.sensitivity(model, [batch], lambda m, b=batch: float(m(b).mean()))) for batch in data(2)]
    for rank in found:
        for name, value in rank["measuring"]["score"].items():
            assert value == pytest.approx((scored[0][name] + scored[1][name]) / 2)
        assert "the data to measure with is empty" in rank["measuring"]["no data"]
    bits = bw.search_bits(model, ordered, {"size": 700}, bits=(2, 4, 8)).bits
    assert [rank["measuring"]["bits"] for rank in found] == [bits, bits]


def test_training_keeps_in_step(found):
    here, there = (rank["qat"] for rank in found)
    assert here == there
    options = {"use_grad_scaling": False}  # LSQ's factor depends on the size of the batch
    model = bw.calibrate(prepared("MinMaxObserver", "LearnableFakeQuantize", **options), data(2))
    before = plain(model.state_dict())
    training(model, data(1))
    one = plain(model.state_dict())
    assert one["bitwright.quantizers.input_1.method.scale"] != before["bitwright.quantizers.input_1.method.scale"]
    for name, value in one.items():
        for kind in ("DDP", "FSDP"):
            torch.testing.assert_close(torch.tensor(here[kind][name]), torch.tensor(value), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("what", "timeout"), [("calibrate", 20), ("learning", 20), ("save", 600)])
def test_a_rank_that_dies_is_an_error_on_the_other(what, timeout, tmp_path):
    """A sample, long before the timeout; ``python -m tests.distributed.kills`` tries every job."""
    started = time.monotonic()
    here, there = run(f"dying:{what}", tmp_path)
    assert there is None
    said = f"DistributedError: rank 0 of 2 waited up to {timeout} s (set by timeout=) for the others"
    assert here[f"dying:{what}"]["error"].startswith(said)
    assert time.monotonic() - started < 300


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), 1e10])
def test_no_rank_waits_for_a_time_that_there_is_not(timeout, tmp_path):
    model, said = prepared(), r"timeout=.* must be a number of seconds above 0 and at most 1e\+09"
    with pytest.raises(ConfigError, match=said):
        bw.calibrate(model, data(1), timeout=timeout)
    with pytest.raises(ConfigError, match=said):
        bw.save(model, tmp_path / "m", timeout=timeout)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run("shares,accumulating", tmp_path_factory.mktemp("four"), world=4)


def test_four_ranks_find_the_ranges_of_one(four):
    for observer in FREE:
        one = scales(bw.calibrate(prepared(observer), data()))
        assert [rank["shares"][observer] for rank in four] == [one] * 4


@pytest.mark.parametrize("loss", ["mse", "fisher"])
def test_four_ranks_learn_the_same_and_go_on_from_a_checkpoint(loss, four):
    units, state, resumed = four[0]["shares"][loss]
    assert all(rank["shares"][loss] == [units, state, True] for rank in four)
    assert resumed
    assert sum(after for _, after in units) < 0.97 * sum(before for before, _ in units)
    model = bw.calibrate(few_bits(), data())
    alone = bw.reconstruct(model, data(), "qdrop", steps=20, loss=loss, batch_size=4).units
    assert units[0][0] == pytest.approx(alone[0].before, rel=1e-6)


def test_what_four_ranks_cannot_learn(four):
    for rank in four:
        assert "the data to reconstruct with is empty" in rank["shares"]["no data"]
        assert "the model differs between ranks" in rank["shares"]["other weights"]


@pytest.mark.parametrize(("name", "dtype", "near"), [("float32", None, 1e-3), ("bfloat16", torch.bfloat16, 2e-2)])
def test_four_ranks_accumulate_gradients(name, dtype, near, four):
    assert all(rank["accumulating"] == four[0]["accumulating"] for rank in four)
    model = learning()
    for batch in data(2):
        backward(model, batch.repeat(2, 1, 1, 1), dtype)
    before = plain(model.state_dict())
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    for key, value in plain(model.state_dict()).items():
        change = torch.tensor(value) - torch.tensor(before[key])
        found = torch.tensor(four[0]["accumulating"][name][key]) - torch.tensor(before[key])
        torch.testing.assert_close(found, change, rtol=near, atol=near * float(change.abs().max()))


def test_a_rank_that_hangs_is_waited_for_so_long_and_no_longer(tmp_path):
    started = time.monotonic()
    here, _ = run("hanging", tmp_path)
    assert here["hanging"]["error"].startswith("DistributedError: rank 0 of 2 waited up to 2 s")
    assert time.monotonic() - started < 100


def test_synchronized_norms_are_folded_and_train_frozen_as_others_do():
    """By the batch, torch runs them on GPUs only."""
    found = []
    for convert in (lambda model: model, torch.nn.SyncBatchNorm.convert_sync_batchnorm):
        model = bw.prepare(convert(net().eval()), data()[0], "virtual", weight="int8 channel:0", activation="int8")
        bw.calibrate(model, data())
        assert [entry.name for entry in bw.ledger_of(model).entries if "fold" in entry.reason]
        training(model, data(2))
        found.append(plain(model.state_dict()))
    assert found[0] == found[1]


def test_one_process_is_a_group_of_one():
    from bitwright.distributed import all_ranks, from_first_rank

    with all_ranks() as ranks:
        assert ranks.alone
        assert ranks.gather(b"x") == [b"x"]
        assert torch.equal(ranks.gather_tensors({"a": torch.ones(2)})[0]["a"], torch.ones(2))
    assert from_first_rank(lambda: b"y") == b"y"
