"""Schedules of the stage *fuse*; ``lists`` names them."""

from bitwright.compat.sparsebit.quantization.converters.fuse_operations import lists
