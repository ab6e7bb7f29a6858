"""Observers: how a range is found. A new one is one file with ``@register_observer``."""

from bitwright.observers.base import OBSERVERS, Observer, register_observer
from bitwright.observers.ema_minmax import EMAMinMaxObserver
from bitwright.observers.minmax import MinMaxObserver

__all__ = ["OBSERVERS", "EMAMinMaxObserver", "MinMaxObserver", "Observer", "register_observer"]
