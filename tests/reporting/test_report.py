"""The page: its numbers, that it is safe and self-contained, and its table in a browser."""

import base64
import hashlib
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitwright.analysis import Histogram, LayerStats, TensorStats, analyze
from bitwright.correction import calibrate
from bitwright.errors import ConfigError
from bitwright.preparation import Verdict, ledger_of, prepare
from bitwright.reporting import charts, report, text
from bitwright.verification.limits import DEFAULT
from bitwright.verification.proof import Latency, OperatorCheck, OutputCheck, Proof, RuntimeProof, TensorCheck

EVIL = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "input", "br", "link", "img", "hr"}
BATCH = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 8, 3), nn.ReLU()
        self.gelu, self.fc = nn.GELU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gelu(self.relu(self.conv(x)).mean((2, 3))))


class Page(HTMLParser):
    """Collects the tags of a page, its text, and the rows of its table; objects to tags that do not match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.hidden: list[bool] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID | {"path", "rect", "line"}:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.hidden.append("hidden" in dict(attrs))
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in {"path", "rect", "line"}:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data.strip()

    def column(self, head: str) -> list[str]:
        place = self.rows[0].index(head)
        return [row[place] for row, hidden in zip(self.rows[1:], self.hidden[1:], strict=True) if not hidden]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return calibrate(prepare(Small().eval(), BATCH), [BATCH])


@pytest.fixture
def proof() -> Proof:
    fast = RuntimeProof(
        "onnxruntime",
        "9.8.7",
        outputs=[OutputCheck("logits", 0.02, 0.001, 0.0123)],
        tensors=[TensorCheck("relu", 1, 0.0, 0.99999, 100_000), TensorCheck("fc", 3, 0.0, 1.0, 50_000)],
        operators=[
            OperatorCheck("conv", "conv", True, "QLinearConv", multiply_adds=100),
            OperatorCheck("fc", "linear", False, "Gemm", "it has no quantized input", multiply_adds=300),
        ],
        latency=Latency(1.5, 3.75, 1),
        notes=["a note of the runtime"],
    )
    other = RuntimeProof("openvino", "1.2.3", operators=[OperatorCheck("conv", "conv", True, "Convolution_I8")])
    runtimes = {"onnxruntime": fast, "openvino": other}
    return Proof("/some/where/small.onnx", 250_000, 975_000, runtimes, DEFAULT, notes=["a note of the file"])


def page_of(model: nn.Module, proof: Proof | None, tmp_path: Path, **options) -> tuple[Page, str]:
    source = report(model, proof, tmp_path / "page.html", **options).read_text("utf-8")
    return Page(source), source


def test_numbers_of_the_proof(model, proof, tmp_path):
    scores = {"FP32": 0.982, "INT8 simulated": 0.982, "INT8 onnxruntime": 0.9645}
    page, source = page_of(model, proof, tmp_path, accuracy=scores)
    for expected in (
        *("98.20%", "96.45%", "−1.75 points", "no change"),
        *("3.9× smaller", "0.25 MB instead of 0.97 MB", "small.onnx"),
        *("50.0%", "1 of 2 operators executed, 25.0% of multiply–adds", "100%"),
        *("2.50×", "1.50 ms instead of 3.75 ms, 1 sample, one thread"),
        *("99.999%", "150,000 values in 2 tensors"),
        *("3 steps", "first above one step: fc", "outputs differ by at most 1.23%"),
        *("it has no quantized input (runs as Gemm)", "Executed in float by onnxruntime"),
        *(
            "9.8.7",
            "1.2.3",
            torch.__version__,
            "a note of the runtime",
            "a note of the file",
            "Weights use 7 of their 8 bits",
        ),
    ):
        assert expected in page.text, expected
    assert '<p class="verdict good">Verified in onnxruntime and openvino</p>' in source
    assert "Limits missed" not in page.text
    assert '<div class="line bad">' in source  # the accuracy that was lost
    assert "Small · quantization report" in page.text


def test_missed_limits_are_red(model, proof, tmp_path):
    proof.missed = ["onnxruntime: 2.50 times the speed of FP32, less than 4.00", "openvino: too slow"]
    page, source = page_of(model, proof, tmp_path)
    assert '<p class="verdict bad">NOT verified in onnxruntime and openvino</p>' in source
    assert source.index('<section class="missed"') < source.index(proof.missed[0]) < source.index('class="cards"')
    assert "Verified" not in page.text
    assert ".missed li { color: var(--bad)" in source


def test_without_limits_nothing_is_verified(model, proof, tmp_path):
    proof.limits = None
    page, source = page_of(model, proof, tmp_path)
    assert '<p class="verdict open">Compared, not judged, in onnxruntime and openvino</p>' in source
    assert "Verified" not in page.text


def test_what_was_not_measured_is_said(model, tmp_path):
    proof = Proof("small.onnx", 1, 4, {"onnxruntime": RuntimeProof("onnxruntime", "1")}, DEFAULT, ["nothing compared"])
    page, source = page_of(model, proof, tmp_path)
    assert page.text.count("not measured") == 3  # operators, values, gap
    assert "outputs not compared" in page.text
    assert "100% in integers" not in page.text
    assert "verdict good" not in source


def test_table_has_what_analyze_found(model, tmp_path):
    stats = analyze(model, [BATCH, 2 * BATCH])
    page, source = page_of(model, None, tmp_path, stats=stats)
    assert page.rows[0] == [
        *("#", "Layer", "Operator", "Computes", "Output SQNR", "Clipped", "Output range", "Output", "Input"),
        *("Weight SQNR", "Weight"),
    ]
    assert (
        page.column("Layer")
        == [s.name for s in stats]
        == ["x", "conv", "relu", "adaptive_avg_pool2d", "flatten", "gelu", "fc"]
    )
    assert page.column("Output SQNR") == [f"{s.output.sqnr:.1f} dB" for s in stats]
    conv = next(s for s in stats if s.name == "conv")
    row = page.rows[1 + page.column("Layer").index("conv")]
    lo, hi = conv.output.range
    assert row[3:7] == [
        "integer",
        f"{conv.output.sqnr:.1f} dB",
        text.percent(conv.output.clipped),
        f"{lo:.4g} … {hi:.4g}",
    ]
    assert row[7:] == ["uint8affine tensor"] * 2 + [
        f"{conv.weight.sqnr:.1f} dB",
        "int7symmetric narrow channel:0",
    ]
    assert source.count('class="histogram"') == 6  # outputs of x, conv, the pool and fc, weights of conv and fc
    assert text.interval(conv.output.range) in page.text
    assert source == page_of(model, None, tmp_path, batches=[BATCH, 2 * BATCH])[1]


def test_without_data_there_are_specs_and_ranges_only(model, tmp_path):
    page, source = page_of(model, None, tmp_path)
    assert "SQNR" not in page.text
    assert 'class="histogram"' not in source
    assert source.count('class="graph"') == 2  # before and after
    assert "small.onnx" not in source
    assert 'class="cards"' not in source
    assert page.column("Weight")[1] == "int7symmetric narrow channel:0"
    assert "…" in page.column("Output range")[1]
    bare = Page(report(prepare(Small(), BATCH), None, tmp_path / "bare.html").read_text("utf-8"))
    assert set(bare.column("Output range")) == {"–"}


def test_float_operators_are_listed_with_reasons(model, tmp_path):
    page, _ = page_of(model, None, tmp_path)
    assert "gelu" in page.text
    assert "onnxruntime runs it in float" in page.text
    ledger = ledger_of(model)
    ledger.entries = [replace(entry, verdict=Verdict.INTEGER) for entry in ledger.entries]
    assert "Nothing: every operator computes in integers" in page_of(model, None, tmp_path)[0].text


def test_islands_and_notes(model, tmp_path):
    ledger = ledger_of(model)
    ledger.islands, ledger.notes = {"": "it branches on data", "a.b": "too clever"}, ["folded bn into conv"]
    page, _ = page_of(model, None, tmp_path)
    for expected in (
        "the whole model",
        "it branches on data",
        "a.b",
        "too clever",
        "1 rewrite",
        "folded bn into conv",
    ):
        assert expected in page.text


def test_nothing_a_user_names_becomes_markup(model, proof, tmp_path):
    ledger, histogram = ledger_of(model), Histogram(0.0, 1.0, [1, 2])
    ledger.entries = [replace(entry, name=EVIL, operator=EVIL, reason=EVIL) for entry in ledger.entries]
    ledger.islands, ledger.notes = {EVIL: EVIL}, [EVIL]
    tensor = TensorStats(EVIL, (0.0, 1.0), 20.0, 0.5, histogram)
    stats = [LayerStats(EVIL, EVIL, Verdict.INTEGER, EVIL, tensor, tensor, tensor)]
    runtime = proof.runtimes["onnxruntime"]
    runtime.runtime = runtime.version = runtime.tensors[1].name = EVIL
    runtime.operators[1] = OperatorCheck(EVIL, EVIL, False, EVIL, EVIL)
    runtime.notes, proof.notes, proof.missed, proof.file = [EVIL], [EVIL], [EVIL], EVIL
    page, source = page_of(model, proof, tmp_path, stats=stats, accuracy={EVIL: 0.5}, title=EVIL)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "<img" not in source
    assert page.text.count(EVIL) > 15
    titles = {attrs["title"] for _, attrs in page.tags if "title" in attrs}
    assert titles == {EVIL}


def test_page_needs_nothing_but_itself(model, proof, tmp_path):
    page, source = page_of(model, proof, tmp_path, batches=[BATCH])
    assert not re.search(r"https?://|\bsrc\s*=|<link|@import|url\(|<iframe|<object", source)
    assert not [attrs for _, attrs in page.tags if {"src", "href", "srcset", "data", "action"} & set(attrs)]
    (policy,) = (a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*)</script>", source, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "prefers-color-scheme: dark" in source


def test_report_needs_no_onnx():
    check = "import sys, bitwright.reporting; sys.exit('onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


def test_refusals_and_atomic_writes(model, tmp_path):
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        report(model, None, tmp_path)
    with pytest.raises(ConfigError, match=r"this Linear was not made by bitwright\.prepare"):
        report(nn.Linear(1, 1), None, tmp_path / "page.html")
    with pytest.raises(ConfigError, match="accuracy must be a number for each label, not '98%' for 'FP32'"):
        report(model, None, tmp_path / "page.html", accuracy={"FP32": "98%"})
    with pytest.raises(AttributeError):
        report(model, None, tmp_path / "page.html", stats=["not stats"])
    assert list(tmp_path.iterdir()) == []


def test_scores_that_are_no_shares(model, tmp_path):
    page, _ = page_of(model, None, tmp_path, accuracy={"FP32": 12.5, "INT8": 12.75})
    assert "Score" in page.text
    assert "12.75" in page.text
    assert "+0.25" in page.text


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, "0%"),
        (1.0, "100%"),
        (0.5, "50.0%"),
        (0.99999, "99.999%"),
        (0.00001, "0.001%"),
        (1e-12, "<0.000001%"),
    ],
)
def test_percent_never_rounds_to_all_or_nothing(share, expected):
    assert text.percent(share) == expected


def test_decibels():
    assert text.decibels(math.inf) == "exact"
    assert text.decibels(-3.14) == "−3.1 dB"
    assert text.decibels(-0.01) == "0.0 dB"
    assert text.decibels(None) == ""


def test_histogram_marks_the_range_and_what_lies_beyond():
    tensor = TensorStats("uint8 affine tensor", (-1.0, 2.0), 30.0, 0.25, Histogram(-2.0, 2.0, [0, 5, 50, 5]))
    svg = charts.histogram(tensor, "a < b")
    assert re.findall(r'class="edge" x1="([\d.]+)"', svg) == ["160.0", "640.0"]  # a quarter and all of 640
    assert re.findall(r'class="beyond" x="([\d.]+)" y="0" width="([\d.]+)"', svg) == [("0.0", "160.0")]
    assert re.findall(r'class="zero" x1="([\d.]+)"', svg) == ["320.0"]
    heights = [float(h) for h in re.findall(r"M[\d.]+ 120v-([\d.]+)h", svg)]
    assert heights[0] == heights[2] == pytest.approx(114 * math.log(6) / math.log(51), abs=0.1)
    assert heights[1] == 114.0
    assert "a &lt; b: 60 values from −2 to 2, quantized range −1 … 2, 25.0% clipped" in svg


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: the page's script is not tried")
def test_table_sorts_and_filters_in_a_browser(model, tmp_path):
    values = {
        "layer.10": 12.5,
        "layer.2": 9.75,
        "layer.1": None,
        "exact": math.inf,
        "layer.3": -2.0,
        "none": 100.0,
    }
    stats = [
        LayerStats(
            name,
            "conv2d",
            Verdict.FLOAT if name == "none" else Verdict.INTEGER,
            output=TensorStats(sqnr=value),
        )
        for name, value in values.items()
    ]
    path = report(model, None, tmp_path / "page.html", stats=stats)

    def names(address: str) -> list[str]:
        page = Page(_dumped(path, address, tmp_path))
        names.sorts = {row: attrs["aria-sort"] for row, attrs in zip(page.rows[0], _heads(page), strict=True)}
        return page.column("Layer")

    assert names("") == list(values)
    assert names("#sort=sqnr") == ["layer.3", "layer.2", "layer.10", "none", "exact", "layer.1"]
    assert names.sorts["Output SQNR"] == "ascending"
    assert set(names.sorts.values()) == {"ascending", "none"}
    assert names("#sort=-sqnr&runs=integer") == ["exact", "layer.10", "layer.2", "layer.3", "layer.1"]
    assert names.sorts["Output SQNR"] == "descending"
    assert names("#sort=name&filter=layer") == ["layer.1", "layer.2", "layer.3", "layer.10"]

    # By hand: click twice on a heading, then type.
    clicks = """<script>
        const head = document.querySelector("[data-key=name]");
        head.click(); head.click();
        filter.value = "LAYER"; filter.dispatchEvent(new Event("input"));
        document.title = location.hash;
    </script></body>"""
    source = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text("utf-8")).replace("</body>", clicks)
    path.write_text(source, "utf-8")
    assert names("") == ["layer.10", "layer.3", "layer.2", "layer.1"]
    assert names.sorts["Layer"] == "descending"
    assert "<title>#sort=-name&amp;filter=LAYER</title>" in _dumped(path, "", tmp_path)
    assert ">4 of 6 rows</output>" in _dumped(path, "", tmp_path)


def _heads(page: Page) -> list[dict[str, str | None]]:
    return [attrs for tag, attrs in page.tags if tag == "th" and "aria-sort" in attrs]


def _dumped(path: Path, address: str, tmp_path: Path) -> str:
    flags = ["no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", f"user-data-dir={tmp_path / 'profile'}"]
    flags += ["virtual-time-budget=1000", "dump-dom"]
    command = [str(BROWSER), "--headless", *(f"--{flag}" for flag in flags), path.as_uri() + address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
