"""Progress that was forged, with a digest that fits: whatever it holds, it is refused in words."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import bitwright as bw
from bitwright.checkpoints import digest_of
from bitwright.errors import SaveError
from tests.calibration.test_resume import Stop, data, prepared, stopping
from tests.calibration.test_resume_by_block import data as block_data
from tests.calibration.test_resume_by_block import prepared as block_prepared
from tests.calibration.test_resume_by_block import run_until
from tests.reconstruction.test_checkpoint import FEW, fresh


def calibration(folder):
    bw.calibrate(prepared(), data(), checkpoint=folder)


def by_block(folder):
    bw.calibrate_by_block(block_prepared(), block_data(), checkpoint=folder)


def reconstruction(folder):
    model, batches = fresh()
    bw.reconstruct(model, batches, checkpoint=folder, **{**FEW, "steps": 2})


def sensitivity(folder):
    model, batches = fresh()
    bw.sensitivity(model, batches, checkpoint=folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Progress of each job, made once."""
    made = {job: tmp_path_factory.mktemp(job.__name__) for job in (calibration, by_block, reconstruction, sensitivity)}
    with pytest.raises(Stop):
        bw.calibrate(prepared(), stopping(data(), 4), checkpoint=made[calibration])
    with pytest.MonkeyPatch.context() as patch:
        run_until(patch, made[by_block], 9)
    reconstruction(made[reconstruction])
    sensitivity(made[sensitivity])
    return made


def forge(path, data=None, tensors=None):
    """Change what a checkpoint holds, as someone would who knows about its digest."""
    with safe_open(path, "pt") as file:
        text, held = file.metadata(), {name: file.get_tensor(name) for name in sorted(file.keys())}
    text["data"] = text["data"] if data is None else data(json.loads(text["data"]))
    held = held if tensors is None else tensors(held)
    text["digest"] = digest_of([text["identity"], text["data"], held])
    save_file(held, path, text)


FORGED = {
    "nothing": {"data": lambda held: "{}"},
    "a list": {"data": lambda held: "[1]"},
    "nested": {"data": lambda held: "[" * 100_000 + "]" * 100_000},
    "texts": {"data": lambda held: json.dumps(dict.fromkeys(held, "x"))},
    "no tensors": {"tensors": lambda held: {}},
    "shapes": {"tensors": lambda held: {name: torch.ones(3, 7) for name in held}},
}


WITH_TENSORS = [(job, forged) for job in (calibration, by_block, reconstruction) for forged in FORGED]
WITHOUT = [(sensitivity, forged) for forged in FORGED if "data" in FORGED[forged]]


@pytest.mark.parametrize(("job", "forged"), [*WITH_TENSORS, *WITHOUT])
def test_forged_progress(job, forged, folders, tmp_path):
    folder = shutil.copytree(folders[job], tmp_path / "progress")
    forge(next(folder.glob("*.safetensors")), **FORGED[forged])
    with pytest.raises(SaveError, match="remove it to start over"):
        job(folder)


@pytest.mark.parametrize("value", [{}, {"value": {"eval": [1]}}, {"value": {"tensor": "9", "dtype": "load"}}])
def test_forged_values_between_blocks(value, folders, tmp_path):
    folder = shutil.copytree(folders[by_block], tmp_path / "progress")
    forge(next((folder / "blocks").iterdir()), data=lambda held: json.dumps(value))
    with pytest.raises(SaveError, match=r"does not fit the job \(.*Error.*remove it to start over"):
        by_block(folder)
