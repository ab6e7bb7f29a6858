"""Observers: ``register_observer`` and the class they derive from, with Sparsebit's own by their names.

One registered here is chosen by its name in ``OBSERVER.TYPE``.
"""

from bitwright.compat.old_paths import add_paths
from bitwright.compat.sparsebit.own_classes import BaseObserver, DataCache, Granularity
from bitwright.compat.sparsebit.registers import register_observer
from bitwright.observers.aciq import ACIQObserver
from bitwright.observers.ema_minmax import EMAMinMaxObserver as MovingAverageObserver
from bitwright.observers.kl import KLObserver as KLHistogramObserver
from bitwright.observers.minmax import MinMaxObserver
from bitwright.observers.mse import MSEObserver
from bitwright.observers.percentile import PercentileObserver

Observer = BaseObserver
add_paths(
    __name__,
    {
        "base": "BaseObserver DataCache Granularity Observer",
        "minmax": "MinMaxObserver",
        "mse": "MSEObserver",
        "percentile": "PercentileObserver",
        "moving_average": "MovingAverageObserver",
        "kl_histogram": "KLHistogramObserver",
        "aciq": "ACIQObserver",
    },
)
