"""Hooks that keep a layer's inputs and outputs."""

from typing import Any

from torch import nn

from bitwright.compat.refused import refuse


class StopForwardException(Exception):
    """Ends a forward once a hook is done."""


class DataSaverHook:
    """A forward hook that keeps the last inputs and outputs of a layer."""

    def __init__(self, store_input: bool = False, store_output: bool = False, stop_forward: bool = False) -> None:
        self.store_input, self.store_output, self.stop_forward = store_input, store_output, stop_forward
        self.input_store: Any = None
        self.output_store: Any = None

    def __call__(self, module: nn.Module, input_batch: object, output_batch: object) -> None:
        if self.store_input:
            self.input_store = input_batch
        if self.store_output:
            self.output_store = output_batch
        if self.stop_forward:
            raise StopForwardException("a DataSaverHook is done: catch this around the model's call")


__getattr__ = refuse(__name__, {"PerChannelLoadHook": "quantizers load scales of any number of channels on their own"})
