"""Observers: how a range is found. A new one is one file here with ``@register_observer``; nothing else to edit.

``state/`` holds what observers keep of the tensors they see, ``search/`` how they find a range in it.
"""

from bitwright.observers.base import OBSERVERS, Observer, register_observer
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.registry import import_all

__all__ = ["OBSERVERS", "Observer", "StreamingHistogram", "register_observer"]

import_all(__name__, __path__)
