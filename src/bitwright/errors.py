"""The exception tree: every error a user can meet, each with a message that says what to do.

BitwrightError
├── ConfigError (ValueError)        a spec, recipe, rule or argument that is invalid
│   └── UnknownNameError            a name no registry or model knows, with the nearest ones
├── CaptureError                    the model could not be captured, or its capture deviates
├── ScheduleError                   a rewrite of the graph that fails, never settles, or changes what is computed
├── CalibrationError (RuntimeError) data that cannot calibrate: empty, NaN, refused by the model
├── ExportError                     the file could not be written
├── VerifyError                     the file could not be run or compared
├── SaveError                       a saved model or checkpoint that cannot be written or read, or does not fit
├── DistributedError                another process of the job failed, ended or does not answer
└── MissingExtraError (ImportError) an optional package is needed
"""

import difflib
import importlib
import re
from collections.abc import Iterable
from types import ModuleType

_LONGEST = 1_900  # characters of a message


class BitwrightError(Exception):
    """Base of all errors raised on purpose by Bitwright; overlong messages are shortened."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shortened(_printable(a), _LONGEST) if isinstance(a, str) else a for a in args))


def _printable(text: str) -> str:
    """Escape lone surrogates, which file names that are not UTF-8 contain and no terminal can print."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shortened(text: str, longest: int) -> str:
    """The text, or its beginning and end."""
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]} … {text[-longest // 4 :]}"


class ConfigError(BitwrightError, ValueError):
    """A setting that is invalid."""


class UnknownNameError(ConfigError):
    """A name that nothing has."""


class CaptureError(BitwrightError):
    """A model that could not be captured faithfully."""


class CaptureWarning(UserWarning):
    """A model that runs as written, because it could not be captured as a whole."""


class ScheduleError(BitwrightError):
    """A schedule that does not do what it should."""


class CalibrationError(BitwrightError, RuntimeError):
    """Calibration that could not give every quantizer a range."""


class ExportError(BitwrightError):
    """A file that could not be written."""


class VerifyError(BitwrightError):
    """A file that could not be executed or compared."""


class SaveError(BitwrightError):
    """A saved model, or the progress of a job, that cannot be written, cannot be read, or belongs to something else."""


class DistributedError(BitwrightError):
    """Another process of the same job that failed, ended or does not answer."""


class SaveWarning(UserWarning):
    """A saved model that loads into something slightly different: other code, other versions of packages."""


class MissingExtraError(BitwrightError, ImportError):
    """An optional package that the request needs."""


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names most like ``name``, which may be mistyped or incomplete."""
    names = sorted(set(map(str, known)))
    folded = {n.lower(): n for n in names}
    wish = str(name).lower()[:200]  # a key of a config may be a number
    near = [folded[n] for n in difflib.get_close_matches(wish, folded, n=limit, cutoff=0.55)]
    near += [n for n in names if wish and wish in n.lower()]
    return list(dict.fromkeys(near))[:limit]


def suggest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return ``": did you mean 'x'?"``, or the list of what exists, for an unknown ``name``."""
    names = sorted(set(map(str, known)))
    near = nearest(name, names, limit)
    if near:
        return ": did you mean " + " or ".join(repr(n) for n in near) + "?"
    if not names:
        return ": there are none"
    shown = ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
    return f": known are {shown}"


# Lines of OpenVINO's and torch's messages that say where in their code something failed, or that it did.
_PLACES = re.compile(
    r"Exception from |Check '|FrontEnd API failed|Model wasn't fully converted|Summary:|While validating node "
    r"|-- Conversion is failed|-- .* with a message:|To facilitate|backend='\w+' raised:"
)
_UNFINISHED = (":", "for the following indices")
_OPERATOR = re.compile(r"While validating ONNX node '<Node\((\w+)\): (.*?)>'")


def useful_line(error: BaseException) -> str:
    """The line of another program's error that says what is wrong, and the operator that it is wrong with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line.removeprefix("-- ") for line in lines if not (_PLACES.match(line) or _OPERATOR.match(line))]
    where = "".join(f"{name} ({kind}): " for kind, name in _OPERATOR.findall(str(error))[:1])
    first, *rest = said or lines or [type(error).__name__]
    return where + (f"{first} {rest[0]}" if rest and first.endswith(_UNFINISHED) else first)


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{purpose} needs the package '{module}', which is not installed: pip install 'bitwright[{extra}]'"
        ) from error
