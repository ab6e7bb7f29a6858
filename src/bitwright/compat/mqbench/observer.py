"""Observers by MQBench's names."""

from bitwright.observers import Observer as ObserverBase
from bitwright.observers.clip_std import ClipStdObserver
from bitwright.observers.ema_minmax import EMAMinMaxObserver
from bitwright.observers.ema_mse import EMAMSEObserver
from bitwright.observers.ema_quantile import EMAQuantileObserver
from bitwright.observers.lsq import LSQObserver
from bitwright.observers.lsq_plus import LSQPlusObserver
from bitwright.observers.minmax import MinMaxObserver
from bitwright.observers.minmax_floor import MinMaxFloorObserver
from bitwright.observers.mse import MSEObserver
from bitwright.observers.pot_mode import PoTModeObserver

EMAMinMaxFloorObserver = PoTModeObserver

__all__ = [
    "ClipStdObserver",
    "EMAMSEObserver",
    "EMAMinMaxFloorObserver",
    "EMAMinMaxObserver",
    "EMAQuantileObserver",
    "LSQObserver",
    "LSQPlusObserver",
    "MSEObserver",
    "MinMaxFloorObserver",
    "MinMaxObserver",
    "ObserverBase",
    "PoTModeObserver",
]
