"""The boundary to the user: an error is one line on stderr and an exit code; ``--debug`` adds a trace."""

import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer

from bitwright.errors import BitwrightError

INTERRUPTED, TERMINATED = 130, 143
# The base of all typer errors about wrong options, which has no public name.
_UsageError: Any = typer.BadParameter.__mro__[1]


class UserCodeError(BitwrightError):
    """A function that the user named, or its module, raised."""


class Terminated(BaseException):
    """SIGTERM came."""


@dataclass
class State:
    """The settings of one run of the command line."""

    debug: bool = False


def run(app: Callable[..., Any], arguments: Sequence[str]) -> int:
    """Run ``app`` and return the exit code."""
    state = State()
    with _remarks(), _terminable():
        try:
            code = app(list(arguments), prog_name="bitwright", standalone_mode=False, obj=state)
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except Terminated:
            code = TERMINATED
        except _UsageError as error:
            return _refuse(_usage(error), state)
        except BitwrightError as error:
            return _refuse(str(error), state)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return _refuse(f"unexpected {text} (a bug in Bitwright: --debug shows where)", state)
    if code in (INTERRUPTED, TERMINATED):
        print_line("interrupted: no half-written files were left behind; --resume continues a calibration")
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> str:  # noqa: ANN401
    command = error.ctx.command_path if error.ctx is not None else "bitwright"
    return f"{error.format_message().rstrip('.')}; see {command} --help"


def _refuse(message: str, state: State) -> int:
    if state.debug:
        traceback.print_exc()
    print_line(message)
    return 2


def print_line(message: str) -> None:
    """Print one line to stderr."""
    typer.echo(f"bitwright: {one_line(message)}", err=True)


def one_line(message: str) -> str:
    """Join the lines of a message."""
    return " ".join(message.split())


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Report that ``what`` raised, if the error is not one of Bitwright's own."""
    try:
        yield
    except (BitwrightError, typer.Exit):
        raise
    except (Exception, SystemExit) as error:
        text = one_line(str(error))
        raise UserCodeError(f"{what} raised {type(error).__name__}{f': {text}' if text else ''}") from error


@contextmanager
def _terminable() -> Iterator[None]:
    """End on SIGTERM as on SIGINT, with an exception, so that everything is cleaned up."""

    def terminate(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _OneLine(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_line(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def _remarks() -> Iterator[None]:
    """Show what the library logs as warnings, one line each."""
    logger, handler = logging.getLogger("bitwright"), _OneLine(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        sys.stderr.flush()
        logger.removeHandler(handler)
        logger.propagate = propagate
