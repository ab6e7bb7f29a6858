"""Hooks, under the name that MQBench documents."""

from bitwright.compat.mqbench.utils.hook import DataSaverHook as DataSaverHook
from bitwright.compat.mqbench.utils.hook import StopForwardException as StopForwardException
