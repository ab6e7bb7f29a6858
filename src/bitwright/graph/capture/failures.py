"""Tell whose failure an error is: the model's makes an island, and our own must not pass as one.

The innermost frame that is ours or the model's decides. Frames of torch and the standard library do not count, because
both call them; those of ``torch.fx`` count as ours, because only capture calls it. Where our code calls the model's, by
:func:`call_model` or in a :func:`boundary`, anything raised further inside belongs to the model.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import fx

from bitwright.errors import BitwrightError, CaptureError
from bitwright.torch_internals import TRIED

_TORCH = str(Path(torch.__file__).parent) + os.sep
_FX = f"{_TORCH}fx{os.sep}"
_HERE = str(Path(__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_GENERATED = ("<frozen", "<string>")
_boundaries: set[CodeType] = set()
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Untraceable(BitwrightError):
    """Python code asked for something that only the data can tell."""


class Overwritten(Untraceable):
    """Data was written into a tensor that the trace treats as a constant."""


class Unhashable(Untraceable, TypeError):
    """A function that caches its results would have cached a proxy."""


class InternalError(CaptureError):
    """Capture failed because of a bug in Bitwright, or because torch has changed."""


def boundary(function: _Function) -> _Function:
    """Mark a function that does little but call the model's code: an error inside is the model's."""
    _boundaries.add(function.__code__)
    return function


@boundary
def call_model(function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """Call code that belongs to the model, or may fail because of it."""
    return function(*args, **kwargs)


def reason_for(error: Exception, path: str = "") -> str:
    """Why a module cannot be captured: the first line of the error, and where in the user's code it happened.

    A failure of our own is raised as an InternalError.
    """
    place = our_place(error)
    if isinstance(error, InternalError):
        raise error
    if place:
        raise InternalError(
            f"capture failed in Bitwright itself at {place}: {type(error).__name__}: {error}. Your model is not the "
            "cause. Please report this with its traceback and what `python -m bitwright.torch_internals` prints (torch "
            f"{torch.__version__}; tried with {', '.join(TRIED)}). Until it is fixed, "
            + (f"leaves=[{path!r}] keeps that module whole" if path else "bw.swap_modules quantizes without capture")
        ) from error
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    *_, last = _frames(error)
    where = users_line(last.tb_frame)
    return text if where in text or where == "?" else f"{text} at {where}"


def our_place(error: BaseException | None) -> str:
    """Where in our own code an error was caused, as ``file:line in function``; "" if the model caused it."""
    while error is not None and not isinstance(error, BitwrightError | RecursionError | fx.proxy.TraceError):
        last = next((tb for tb in reversed([*_frames(error)]) if _decides(tb.tb_frame.f_code)), None)
        if last is not None and _is_ours(last.tb_frame.f_code):
            code = last.tb_frame.f_code
            return f"{code.co_filename}:{last.tb_lineno} in {code.co_name}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def users_line(frame: FrameType | None = None) -> str:
    """The innermost file and line outside capture and torch, as ``file:line``."""
    frame = frame or sys._getframe(1)
    fallback = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, "<")):
            place = f"{name}:{frame.f_lineno}"
            if not name.startswith(_TORCH):
                return place
            fallback = fallback or place
        frame = frame.f_back
    return fallback or "?"


def frames_to_user() -> int:
    """How many frames above its caller the user's code is: the ``stacklevel`` for a warning."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and (_is_ours(frame.f_code) or not _decides(frame.f_code)):
        frame, level = frame.f_back, level + 1
    return level


def _frames(error: BaseException) -> Iterator[TracebackType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_ours(code: CodeType) -> bool:
    return code not in _boundaries and code.co_filename.startswith((_OURS, _FX))


def _decides(code: CodeType) -> bool:
    name = code.co_filename
    if code in _boundaries or name.startswith((_OURS, _FX)):
        return True
    library = name.startswith(_PYTHON) and "site-packages" not in name
    return not (library or name.startswith((_TORCH, *_GENERATED)))
