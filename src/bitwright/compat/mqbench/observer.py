"""Observers by MQBench's names."""

from bitwright.observers import OBSERVERS, Observer

ObserverBase = Observer
_NAMES = "MinMax EMAMinMax MinMaxFloor EMAMinMaxFloor PoTMode EMAQuantile ClipStd LSQ LSQPlus MSE EMAMSE"
globals().update({f"{name}Observer": OBSERVERS.get(f"{name}Observer") for name in _NAMES.split()})
