"""Logging: what a script that takes it over calls first."""

import logging


def reset_logger_handler() -> None:
    """Leave what is logged to the handlers of the application alone."""
    logger = logging.getLogger("bitwright")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
