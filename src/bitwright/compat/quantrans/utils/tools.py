"""``dict_merge``: gives a quantized layer the weights and settings of the float one."""

from collections.abc import Mapping
from typing import Any


def dict_merge(dct: dict[Any, Any], merge_dct: Mapping[Any, Any]) -> None:
    """Put all of ``merge_dct`` into ``dct``, dicts inside into the dicts there."""
    for key, value in merge_dct.items():
        if isinstance(value, Mapping) and isinstance(dct.get(key), dict):
            dict_merge(dct[key], value)
        else:
            dct[key] = value
