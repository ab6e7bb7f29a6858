"""``profiling``: how well each layer's result survives quantization, as the cosine to the float result."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bitwright.compat.mqbench.utils.logger import logger
from bitwright.compat.node_by_node import layer_errors
from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.graph import Inputs

_KINDS = ("standalone", "interaction")


def profiling(
    model: nn.Module, cali_data: Iterable[Any], profiling_type: str = "standalone", module_list: object = None
) -> dict[str, float]:
    """The cosine between the float and the quantized result of every quantized layer, by its name, worst first.

    Args:
        model: a prepared and calibrated model; it is unchanged afterwards.
        cali_data: batches to look at.
        profiling_type: ``standalone`` quantizes each layer alone, ``interaction`` all layers before it, too.
        module_list: not supported; pass the parts of a model themselves instead.
    """
    if profiling_type not in _KINDS:
        raise UnknownNameError(f"unknown profiling_type {profiling_type!r}{suggest(str(profiling_type), _KINDS)}")
    if module_list is not None:
        raise ConfigError("module_list is not taken: call profiling on each prepared part with its own data")
    runs = [layer_errors(model, Inputs.of(batch), cosine, profiling_type == "standalone") for batch in cali_data]
    if not runs:
        raise ConfigError("cali_data is empty: profiling needs a batch")
    means = {name: sum(float(run[name]) for run in runs) / len(runs) for name in runs[0]}
    found = dict(sorted(means.items(), key=lambda item: item[1]))
    lines = [f"{name}: {value:.6f}" for name, value in found.items()]
    logger.info("cosines (%s), worst first:\n%s", profiling_type, "\n".join(lines))
    return found


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """The cosine of the angle between two tensors."""
    return nn.functional.cosine_similarity(x.flatten().double(), y.flatten().double(), dim=0)
