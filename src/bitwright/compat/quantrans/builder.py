"""QUANTRANSFORMERS: model transformers by name, and ``build_mtransformer``."""

from collections.abc import Mapping
from typing import Any

from bitwright.compat.quantrans.quantops.builder import LayerRegistry

QUANTRANSFORMERS = LayerRegistry("model transformer")


def build_mtransformer(cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> Any:
    """Make a transformer of ``QUANTRANSFORMERS``.

    ::

        transformer = build_mtransformer(cfg.quant_transformer)
        model = transformer(model, logger=logger)
    """
    return QUANTRANSFORMERS.build(cfg, default_args)
