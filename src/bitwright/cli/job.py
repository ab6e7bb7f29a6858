"""A job: one model to quantize, checked as a whole first, then run step by step."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.analysis import analyze
from bitwright.backends import Backend
from bitwright.calibration import calibrate
from bitwright.cli.inputs import Batches, call_if_function, cut_to_model, read_batches
from bitwright.cli.load import load, load_model
from bitwright.cli.output import step
from bitwright.cli.scores import DeployedModel, Scores, first_scores, missed_drop, score
from bitwright.cli.summary import Outcome
from bitwright.cli.wishes import read_wishes
from bitwright.errors import ConfigError
from bitwright.exporting import FORMATS, ExportFormat, export
from bitwright.files import check_output
from bitwright.preparation import ledger_of, prepare
from bitwright.recipe import Recipe

REPORT = "report.html"
_ANALYZED_BATCHES = 8


@dataclass
class Job:
    """What to do, with nothing left that could have been refused beforehand."""

    target: str
    data: tuple[Any, str]
    evaluate: tuple[Callable[[nn.Module], Any], str] | None
    example: tuple[Any, str] | None
    backend: Backend
    recipe: Recipe
    format: str
    file: Path
    report: Path
    runtimes: list[str] | None
    latency: bool
    limits: Mapping[str, float]
    max_drop: float | None

    @classmethod
    def check(
        cls,
        *,
        model: str,
        data: str,
        evaluate: str | None,
        example: str | None,
        wishes: tuple[str | None, Path | None, str | None, str | None, Iterable[str] | None],
        output: Path,
        name: str | None,
        format: str | None,
        force: bool,
        runtimes: list[str] | None,
        latency: bool,
        limits: Mapping[str, float | None],
        max_drop: float | None,
    ) -> "Job":
        """Refuse what cannot work, before the model is even built."""
        if limits["speedup"] is not None and not latency:
            raise ConfigError("--min-speedup needs the speed to be measured: leave out --no-latency")
        if max_drop is not None and evaluate is None:
            raise ConfigError("--max-accuracy-drop needs --eval, to know the accuracy")
        load(model, "the model")
        source = (load(data, "--data"), f"--data {data}")
        judge = (load(evaluate, "--eval"), f"--eval {evaluate}") if evaluate else None
        if judge is not None and not callable(judge[0]):
            raise ConfigError(f"{judge[1]} must be a function of the model, not {type(judge[0]).__name__}")
        backend, recipe = read_wishes(*wishes)
        writer = FORMATS.get(format or backend.formats[0])
        file, report = check_outputs(output, name or f"model{writer.suffix}", writer.suffix, force)
        check_extras(backend, writer, runtimes)
        return cls(
            target=model,
            data=source,
            evaluate=judge,
            example=(load(example, "--example"), f"--example {example}") if example else None,
            backend=backend,
            recipe=recipe,
            format=writer.name,
            file=file,
            report=report,
            runtimes=runtimes or None,
            latency=latency,
            limits={k: v for k, v in limits.items() if v is not None},
            max_drop=max_drop,
        )

    def run(self) -> Outcome:
        """Quantize, export, verify, evaluate and report."""
        from bitwright.reporting import report
        from bitwright.verification import run_file, verify

        with step("building the model"):
            model = load_model(self.target)
            batches = read_batches(*self.data)
            example = self._example(model, batches)
        with step("preparing"):
            qmodel = prepare(model, example, self.backend, recipe=self.recipe)
        before = self._score(model, "the float model")
        calibrate(qmodel, batches)
        with step("exporting"):
            export(qmodel, self.file, format=self.format)
            self.report.unlink(missing_ok=True)  # it spoke of the file that was replaced
        proof = verify(qmodel, self.file, batches, runtimes=self.runtimes, limits=self.limits, latency=self.latency)
        simulated = self._score(qmodel, "the simulation", before)
        deployed: dict[str, Scores] = {}
        if self.evaluate is not None:
            for runtime in proof.runtimes:
                file = DeployedModel(run_file(self.file, runtime))
                deployed[runtime] = self._score(file, f"the file in {runtime}", before)
        if self.max_drop is not None:
            proof.missed += missed_drop(before, deployed, self.max_drop)
        report(
            qmodel,
            proof,
            self.report,
            stats=analyze(qmodel, list(islice(batches, _ANALYZED_BATCHES))),
            accuracy=first_scores(before, simulated, deployed),
            title=f"{self.target} for {self.backend.name}",
        )
        return Outcome(self.target, ledger_of(qmodel), proof, self.report, before, simulated, deployed)

    def _example(self, model: nn.Module, batches: Batches) -> Any:  # noqa: ANN401
        if self.example is not None:
            return call_if_function(*self.example)
        return cut_to_model(model, batches.first())

    def _score(self, model: nn.Module, what: str, like: Scores | None = None) -> Scores:
        if self.evaluate is None:
            return {}
        with step(f"evaluating {what}"):
            return score(self.evaluate[0], model, f"{self.evaluate[1]} on {what}", like)


def check_outputs(folder: Path, name: str, suffix: str, force: bool) -> tuple[Path, Path]:
    """Say where the files will be, or why they cannot be there."""
    if Path(name).name != name or not name.endswith(suffix):
        raise ConfigError(f"--name {name!r} must be the name of an {suffix} file, without a folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the output {str(folder)!r} is not a folder")
    outputs = [check_output(folder / n) for n in (name, REPORT)]
    for path in outputs:
        if path.exists() and not force:
            raise ConfigError(f"the output {str(path)!r} exists already: add --force to replace it")
    return outputs[0], outputs[1]


def check_extras(backend: Backend, writer: type[ExportFormat], runtimes: Iterable[str] | None) -> None:
    """Make sure that the file can be written, and run somewhere."""
    writer()
    from bitwright.verification import RUNTIMES

    if runtimes:
        for name in runtimes:
            RUNTIMES.get(name)()
    elif not backend.runtimes:
        raise ConfigError(f"no runtime on this machine executes files for {backend.name}; see bitwright backends")
    elif not any(RUNTIMES.get(name).available() for name in backend.runtimes):
        RUNTIMES.get(backend.runtimes[0])()
