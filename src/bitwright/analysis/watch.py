"""Watch: show meters every result inside a model as it runs, and leave no trace afterwards."""

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, fx, nn

from bitwright.analysis.meter import Meter
from bitwright.analysis.rows import Row
from bitwright.graph import CapturedModel
from bitwright.graph.inputs import bind_to
from bitwright.modes import eval_mode
from bitwright.preparation import Verdict
from bitwright.quantizer import quantizers


class Record:
    """Holds one batch's float results until the quantized ones arrive."""

    def __init__(self) -> None:
        self.quantized = False
        self._kept: dict[Meter, deque[Tensor]] = defaultdict(deque)

    def see(self, meter: Meter, value: object) -> None:
        """Take a result of the current pass."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        if not self.quantized:
            meter.look(value)
            self._kept[meter].append(value.clone())  # a later operator may write into it
        elif self._kept[meter] and (before := self._kept[meter].popleft()).shape == value.shape:
            meter.compare(before, value)

    def clear(self) -> None:
        """Forget unmatched results."""
        self._kept.clear()


class _Watch(fx.Interpreter):
    """Runs a graph node by node and shows the results that are measured."""

    def __init__(self, region: CapturedModel, record: Record) -> None:
        super().__init__(region)
        self.extra_traceback = False
        self.meters: dict[fx.Node, Meter] = {}
        self.record = record

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401
        """Run one node."""
        result = super().run_node(n)
        if n in self.meters:
            self.record.see(self.meters[n], result)
        return result


@contextmanager
def watched(model: nn.Module, rows: list[Row], record: Record) -> Generator[None, None, None]:
    """Temporarily interpret the graphs of a model, and hook its layers outside graphs."""
    watches = {m: _Watch(m, record) for m in model.modules() if isinstance(m, CapturedModel)}
    with ExitStack() as undo:
        for row in rows:
            histogram = row.output is not None or row.stats.verdict is Verdict.INTEGER
            if row.region is not None and row.point is not None:
                meters = watches[row.region].meters
                row.meters["output"] = meters.setdefault(row.point, Meter(row.output, histogram=histogram))
            elif row.module is not None:
                row.meters["output"] = Meter(None, histogram=histogram)
                undo.callback(_hook(row.module, row.meters["output"], record))
            if row.input is not None:
                row.meters["input"] = Meter(row.input)
                undo.callback(_hook(row.input, row.meters["input"], record))
        for region, watch in watches.items():
            region.__dict__["forward"] = _interpreted(region, watch)
            undo.callback(region.__dict__.pop, "forward")
        yield


@contextmanager
def unchanged(model: nn.Module) -> Generator[None, None, None]:
    """Evaluate a model, then restore every quantizer's mode and every module's training flag."""
    modes = {q: q.mode for q in quantizers(model).values()}
    with eval_mode(model):
        try:
            yield
        finally:
            for quantizer, mode in modes.items():
                quantizer.mode = mode


def _hook(module: nn.Module, meter: Meter, record: Record) -> Callable[[], None]:
    def look(_module: nn.Module, _args: object, result: object) -> None:
        record.see(meter, result)

    return module.register_forward_hook(look).remove


def _interpreted(region: CapturedModel, watch: _Watch) -> Callable[..., Any]:
    signature = inspect.signature(region.forward)
    inputs = {str(node.target): node.args for node in region.graph.nodes if node.op == "placeholder"}

    def forward(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
        given = bind_to(signature, args, kwargs)
        return watch.run(*(given.get(name, *default) for name, default in inputs.items()))

    return forward
