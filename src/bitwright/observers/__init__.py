"""Observers: how a range is found. A new one is one file with ``@register_observer``."""

from bitwright.observers.aciq import ACIQObserver
from bitwright.observers.base import OBSERVERS, Observer, register_observer
from bitwright.observers.clip_std import ClipStdObserver
from bitwright.observers.ema_minmax import EMAMinMaxObserver
from bitwright.observers.ema_mse import EMAMSEObserver
from bitwright.observers.ema_quantile import EMAQuantileObserver
from bitwright.observers.histogram import HistogramObserver
from bitwright.observers.kl import KLObserver
from bitwright.observers.lsq import LSQObserver
from bitwright.observers.lsq_plus import LSQPlusObserver
from bitwright.observers.minmax import MinMaxObserver
from bitwright.observers.minmax_floor import MinMaxFloorObserver
from bitwright.observers.mse import MSEObserver
from bitwright.observers.percentile import PercentileObserver
from bitwright.observers.pot_mode import PoTModeObserver
from bitwright.observers.streaming import StreamingHistogram

__all__ = [
    "OBSERVERS",
    "ACIQObserver",
    "ClipStdObserver",
    "EMAMSEObserver",
    "EMAMinMaxObserver",
    "EMAQuantileObserver",
    "HistogramObserver",
    "KLObserver",
    "LSQObserver",
    "LSQPlusObserver",
    "MSEObserver",
    "MinMaxFloorObserver",
    "MinMaxObserver",
    "Observer",
    "PercentileObserver",
    "PoTModeObserver",
    "StreamingHistogram",
    "register_observer",
]
