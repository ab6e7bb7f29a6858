"""A job: one model to quantize, checked completely first, then run step by step."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.analysis import analyze
from bitwright.backends import Backend
from bitwright.cli.inputs import Batches, call_if_function, cut_to_model, read_batches
from bitwright.cli.load import load, load_model
from bitwright.cli.options import check_limits
from bitwright.cli.output import step
from bitwright.cli.scores import DeployedModel, Scores, first_scores, missed_drop, score
from bitwright.cli.summary import Outcome
from bitwright.correction import calibrate, correct
from bitwright.distributed import from_first_rank, rank, under_torchrun, world_size
from bitwright.errors import ConfigError
from bitwright.exporting import FORMATS, ExportedFile, ExportFormat, ExportOptions, export
from bitwright.files import check_output
from bitwright.preparation import ledger_of, prepare, resolve_recipe
from bitwright.preparation.tune import check_tuning
from bitwright.saving import save
from bitwright.saving.folder import check_folder
from bitwright.saving.manifest import FILES, MANIFEST

REPORT = "report.html"
PROGRESS = "checkpoint"  # the folder, next to the files, of an unfinished calibration
_ANALYZED_BATCHES = 8


@dataclass
class Job:
    """What the user asked for; creating one refuses what cannot work, before the model is even built."""

    model: str
    data: str
    evaluate: str | None
    example: str | None
    wishes: tuple[str | None, Path | None, str | None, str | None, Iterable[str]]
    output: Path
    name: str | None
    format: str | None
    written: dict[str, Any]
    force: bool
    runtimes: list[str] | None
    latency: bool
    limits: Mapping[str, float | None]
    max_drop: float | None
    save: Path | None
    resume: bool
    verify: bool = True
    tune: str | None = None

    def __post_init__(self) -> None:
        asked = [value for value in (*self.limits.values(), self.max_drop, self.runtimes) if value is not None]
        if not self.verify and asked:
            raise ConfigError("limits and --runtime need the file to be run: leave out --no-verify")
        check_limits(
            self.limits["speedup"], latency=self.latency, max_accuracy_drop=self.max_drop, evaluate=self.evaluate
        )
        load(self.model, "the model")
        self._data = load(self.data, "--data")
        self._evaluate = _load_judge(self.evaluate)
        self._example = load(self.example, "--example") if self.example else None
        self._recipe, self._backend = resolve_recipe(*self.wishes)
        check_tuning(self.tune, self._backend)
        self._options = ExportOptions(**self.written)  # refuses what no model can support
        writer = FORMATS.get(self.format or next(iter(self._backend.formats), "onnx"))
        names = (self.name or f"model{writer.suffix}", REPORT)
        self._file, self._report = check_outputs(self.output, names, writer.suffix, self.force)
        if self.save is not None:
            check_folder(self.save, FILES, MANIFEST)
        if self.verify:
            check_extras(self._backend, self.runtimes)
            _check_format(writer, self._backend)
        writer()
        self._format = writer.name

    def run(self) -> Outcome | None:
        """Quantize, export, verify, evaluate and report; under torchrun, ranks other than 0 only help to calibrate.

        The progress of calibration survives a job that fails, is interrupted or killed.
        """
        progress = self.output / PROGRESS
        with under_torchrun():
            if not self.resume:  # before any rank looks for it
                from_first_rank(lambda: _forget(progress))
            qmodel, batches, before = self._calibrated(progress)
            with step("exporting"):
                written = export(qmodel, self._file, format=self._format, **self.written)
                self._report.unlink(missing_ok=True)  # it described the file that was replaced
            if self.save is not None:
                given = {"model": self.model, "data": self.data, "eval": self.evaluate}
                save(qmodel, self.save, source={name: value for name, value in given.items() if value})
            if rank() != 0:
                return None
            outcome = self._prove(qmodel, written, batches, before)
            _forget(progress)
        return outcome

    def _calibrated(self, progress: Path) -> tuple[nn.Module, Batches, Scores]:
        """The quantized model, the data, and the scores of the float model."""
        with step("building the model"):
            model = load_model(self.model)
            batches = read_batches(self._data, f"--data {self.data}")
            if self.example is None:
                example = cut_to_model(model, batches.first())
            else:
                example = call_if_function(self._example, f"--example {self.example}")
        with step("preparing"):
            qmodel = prepare(model, example, self._backend, recipe=self._recipe, tune=self.tune)
        FORMATS.get(self._format)().check(qmodel, ledger_of(qmodel).example, self._options)
        before = self._score(model, "the float model") if rank() == 0 else {}
        mine = batches if world_size() == 1 else islice(batches, rank(), None, world_size())
        calibrate(qmodel, mine, correct=False, checkpoint=progress, uneven=True)
        if self._recipe.correct:
            with step("correcting"):
                correct(qmodel, batches)  # all of them on every rank, so that every rank gets the same model
        return qmodel, batches, before

    def _prove(self, qmodel: nn.Module, written: ExportedFile, batches: Batches, before: Scores) -> Outcome:
        from bitwright.reporting import report
        from bitwright.verification import Proof, run_file, verify

        limits = {name: value for name, value in self.limits.items() if value is not None}
        if self.verify:
            proof = verify(qmodel, written, batches, runtimes=self.runtimes, limits=limits, latency=self.latency)
        else:
            file = FORMATS.get(self._format)().read(self._file)
            proof = Proof(str(self._file), file.size, file.float_twin().size)
        simulated = self._score(qmodel, "the simulation", before)
        deployed: dict[str, Scores] = {}
        for runtime in [name for name, found in proof.runtimes.items() if before and not found.crash]:
            deployed_model = DeployedModel(run_file(self._file, runtime))
            deployed[runtime] = self._score(deployed_model, f"the file in {runtime}", before)
        if self.max_drop is not None:
            proof.missed += missed_drop(before, deployed, self.max_drop)
        report(
            qmodel,
            proof,
            self._report,
            stats=analyze(qmodel, list(islice(batches, _ANALYZED_BATCHES))),
            accuracy=first_scores(before, simulated, deployed),
            title=f"{self.model} for {self._backend.name}",
        )
        return Outcome(self.model, ledger_of(qmodel), proof, self._report, before, simulated, deployed)

    def _score(self, model: nn.Module, what: str, like: Scores | None = None) -> Scores:
        if self._evaluate is None:
            return {}
        with step(f"evaluating {what}"):
            return score(self._evaluate, model, f"--eval {self.evaluate} on {what}", like)


def _load_judge(name: str | None) -> Callable[[nn.Module], object] | None:
    if not name:
        return None
    judge = load(name, "--eval")
    if not callable(judge):
        raise ConfigError(f"--eval {name} must be a function of the model, not {type(judge).__name__}")
    return judge


def _check_format(writer: type[ExportFormat], backend: Backend) -> None:
    """Refuse a format whose files would stay unproven, because nothing can check the target's demands in them."""
    if backend.constraints and not writer.checkable:
        raise ConfigError(
            f"nothing can check what {backend.name} demands of files in the format {writer.name}: use --format "
            f"{' or '.join(backend.formats)}, or --no-verify"
        )


def _forget(progress: Path) -> bytes:
    """Remove what calibration wrote into a folder, and the folder if nothing else is in it."""
    for file in progress.glob("calibration*.safetensors"):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        progress.rmdir()
    return b""


def check_outputs(folder: Path, names: tuple[str, ...], suffix: str, force: bool) -> list[Path]:
    """Return where the files will be, or say why they cannot be there."""
    if Path(names[0]).name != names[0] or not names[0].endswith(suffix):
        raise ConfigError(f"--name {names[0]!r} must be the name of an {suffix} file, without a folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the output {str(folder)!r} is not a folder")
    outputs = [check_output(folder / name) for name in names]
    for path in outputs:
        if path.exists() and not force:
            raise ConfigError(f"the output {str(path)!r} exists already: add --force to replace it")
    return outputs


def check_extras(backend: Backend, runtimes: Iterable[str] | None) -> None:
    """Make sure that some runtime can run the file."""
    from bitwright.verification import RUNTIMES

    known = backend.runtimes or ("reference",)
    for name in runtimes or known[:1]:
        if runtimes or not any(RUNTIMES.get(other).available() for other in known):
            RUNTIMES.get(name)()
