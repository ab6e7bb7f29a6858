"""Helpers of QuanTransformer."""

from bitwright.compat.quantrans.utils.tools import dict_merge
