"""Weights mapped from files: models compute what they do in memory, to the bit, and take no memory for them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, SaveError
from bitwright.mapped_weights import mapped_again
from bitwright.quantizer import quantizers
from tests.saving.nets import TOKENS, Tokens, outputs

ROOT = Path(__file__).parents[2]


class Residual(nn.Module):
    """Two layers and a way around them."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Images(nn.Sequential):
    def __init__(self):
        parts = [nn.Conv2d(3, 8, 3), *(Residual() for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(*parts, nn.Linear(8, 4))


class Sequences(nn.Module):
    """A transformer whose embeddings are also its last layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.layers(self.table(tokens)))


def images(count):
    return [torch.linspace(-i, 2, 2 * 3 * 6 * 6).sin().reshape(2, 3, 6, 6) for i in range(1, count + 1)]


NETS = {
    "convolutions": (Images, images(3)),
    "attention": (Sequences, [TOKENS, TOKENS.flip(1)]),
    "an island": (Tokens, [TOKENS, TOKENS.flip(1)]),
}


def on_meta(build):
    with torch.device("meta"):
        return build().eval()


def ranges(model):
    return {name: [t.tolist() for t in q.qparams()] for name, q in quantizers(model).items()}


@pytest.mark.parametrize("limit", [1e9, 100])
@pytest.mark.parametrize("name", NETS)
def test_prepared_calibrated_saved_and_loaded_as_in_memory(name, limit, tmp_path):
    build, batches = NETS[name]
    torch.manual_seed(0)
    model = build().eval()
    file = tmp_path / "weights.safetensors"
    state = {id(t): (n, t) for n, t in model.state_dict(keep_vars=True).items()}
    save_file({n: t.detach() for n, t in state.values()}, file)
    expected = bw.calibrate(bw.prepare(model, batches[0]), batches)
    before = file.read_bytes()
    mapped = bw.prepare(bw.map_weights(on_meta(build), file), batches[0])
    assert all(hasattr(p, "mapped_from") for n, p in mapped.named_parameters())
    bw.calibrate_by_block(mapped, batches, memory_limit=limit)
    assert ranges(mapped) == ranges(expected)
    assert all(q.quantizes for q in quantizers(mapped).values())
    for each, folder in ((expected, "one"), (mapped, "two")):
        bw.save(each, tmp_path / folder)
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two"))
    assert one == two
    loaded = bw.load(tmp_path / "two", lambda: on_meta(build))
    assert all(torch.equal(outputs(loaded, batch), outputs(expected, batch)) for batch in batches)
    loaded.train()(batches[0]).sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    assert file.read_bytes() == before
    assert (tmp_path / "two/model.safetensors").read_bytes() == two


def test_blocks_are_several(tmp_path, monkeypatch):
    """Otherwise the test above would show nothing."""
    from bitwright.reconstruction import blockwise

    seen, whole = [], blockwise._Job._observe_block
    monkeypatch.setattr(blockwise._Job, "_observe_block", lambda *given: (seen.append(given[1].name), whole(*given)))
    bw.calibrate_by_block(bw.prepare(Images().eval(), images(1)[0]), images(2))
    assert seen == ["0", "1", "2", "3", "6"]


def test_a_copy_of_a_weight_that_has_changed_is_a_copy(tmp_path):
    file = tmp_path / "w.safetensors"
    save_file(nn.Linear(4, 4).state_dict(), file)
    model = bw.map_weights(on_meta(lambda: nn.Linear(4, 4)), file)
    assert torch.equal(mapped_again(model.weight), model.weight)
    assert mapped_again(model.weight).data_ptr() != model.weight.data_ptr()
    model.weight.data[0] += 1
    assert mapped_again(model.weight) is None
    x = torch.ones(2, 4)
    prepared = bw.prepare(model.eval(), x)
    assert torch.equal(prepared(x), model(x))
    with torch.no_grad():
        prepared.weight.zero_()
    assert model.weight.abs().sum() > 0
    assert load_file(file)["weight"].abs().sum() > 0
    save_file({"weight": torch.zeros(4, 4)}, file)
    assert mapped_again(model.bias) is None


def test_several_files_and_folders(tmp_path):
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    for i in (0, 1):
        save_file({n: t for n, t in state.items() if n.startswith(str(i))}, tmp_path / f"{i}.safetensors")
    for files in (tmp_path, sorted(tmp_path.iterdir())):
        model = bw.map_weights(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), files)
        assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


def test_what_cannot_be_mapped_is_refused(tmp_path):
    file = tmp_path / "w.safetensors"
    save_file({"weight": torch.zeros(4, 4)}, file)
    with pytest.raises(ConfigError, match=r"the weights do not have bias, which the model has on the meta device"):
        bw.map_weights(on_meta(lambda: nn.Linear(4, 4)), file)
    wrong = r"weight is float32\[5, 4\] in the model and float32\[4, 4\] in"
    with pytest.raises(ConfigError, match=wrong):
        bw.map_weights(on_meta(lambda: nn.Linear(4, 5, bias=False)), file)
    with pytest.raises(ConfigError, match=r"weight is float16\[4, 4\] in the model and float32.*model\.to\(dtype\)"):
        bw.map_weights(on_meta(lambda: nn.Linear(4, 4, bias=False).half()), file)
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 20)
    for path, message in (("broken.safetensors", "cannot be read"), ("none.safetensors", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            bw.map_weights(on_meta(lambda: nn.Linear(4, 4)), tmp_path / path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no safetensors file"):
        bw.map_weights(on_meta(lambda: nn.Linear(4, 4)), tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"weight is on the meta device, where it has no values: bw\.map_weights"):
        bw.prepare(on_meta(lambda: nn.Linear(4, 4)), torch.ones(1, 4))
    bw.save(bw.prepare(nn.Linear(4, 4), torch.ones(1, 4)), tmp_path / "m")
    with pytest.raises(
        SaveError, match=r"on the meta device, does not match what was saved: weight is float32\[5, 4\]"
    ):
        bw.load(tmp_path / "m", lambda: on_meta(lambda: nn.Linear(4, 5)))


def test_what_calibrate_refuses_is_refused_by_block():
    model = bw.prepare(Images().eval(), images(1)[0])
    with pytest.raises(bw.errors.CalibrationError, match="the calibration data is empty"):
        bw.calibrate_by_block(model, [])
    with pytest.raises(bw.errors.CalibrationError, match="calibration batch 2 produces NaN or infinity"):
        bw.calibrate_by_block(model, [images(1)[0], images(1)[0] * float("nan")])
    with pytest.raises(bw.errors.CalibrationError, match="the block 0 refuses calibration batch 1"):
        bw.calibrate_by_block(model, [torch.ones(2, 5, 6, 6)])
    assert not any(q.calibrated for q in quantizers(model).values())


MEMORY = """
import sys, torch, bitwright as bw
from safetensors.torch import save_file
from benchmarks.scale import Peak
from torch import nn
def build():
    return nn.Sequential(*(nn.Linear(1600, 1600) for _ in range(12)))
x, file = torch.randn(4, 1600), sys.argv[1] + "/w.safetensors"
save_file(build().state_dict(), file)
bw.calibrate_by_block(bw.prepare(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)), [torch.randn(2, 8)])
with Peak() as peak:
    with torch.device("meta"):
        model = build()
    model = bw.calibrate_by_block(bw.prepare(bw.map_weights(model, file), x), [x, x])
    bw.save(model, sys.argv[1] + "/saved")
    with torch.device("meta"):
        model = build()
    bw.load(sys.argv[1] + "/saved", model)
print(peak.growth / (12 * 1600 * 1600 * 4))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what memory is used")
def test_memory_holds_a_few_layers_of_twelve(tmp_path):
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    assert float(done.stdout.split()[-1]) < 0.3
