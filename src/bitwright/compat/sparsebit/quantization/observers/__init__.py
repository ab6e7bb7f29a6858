"""Observers: ``register_observer`` and the class they derive from, with Sparsebit's own by their names.

One registered here is chosen by its name in ``OBSERVER.TYPE``.
"""

from bitwright.compat.sparsebit.registers import register_observer
from bitwright.observers import Observer
from bitwright.observers.aciq import ACIQObserver
from bitwright.observers.ema_minmax import EMAMinMaxObserver
from bitwright.observers.kl import KLObserver
from bitwright.observers.minmax import MinMaxObserver
from bitwright.observers.mse import MSEObserver
from bitwright.observers.percentile import PercentileObserver
from bitwright.spec import Granularity

BaseObserver = Observer
MovingAverageObserver = EMAMinMaxObserver
KLHistogramObserver = KLObserver
