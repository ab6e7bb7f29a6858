"""The logger of MQBench's names."""

import logging

logger = logging.getLogger("bitwright.compat.mqbench")


def set_log_level(level: int | str) -> None:
    """Let messages of that level and above pass."""
    logger.setLevel(level)


def disable_logging() -> None:
    """Say nothing more."""
    logger.disabled = True
