"""MQBench's utilities: ``state`` switches quantizers, ``profiling`` finds where accuracy is lost."""

from bitwright.compat.mqbench.utils.utils import (
    deepcopy_graphmodule,
    deepcopy_mixedmodule,
    is_symmetric_quant,
    pot_quantization,
    sync_tensor,
    topology_order,
)
