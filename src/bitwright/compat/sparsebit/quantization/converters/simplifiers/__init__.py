"""Schedules of the stage *simplify*; ``lists`` names them."""

from bitwright.compat.sparsebit.quantization.converters.simplifiers import lists
