"""What a runtime returns by default, without the settings of a proof that keep its float parts in float32."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.verification.isolation.child import RuntimeDied
from bitwright.verification.outputs import FLOAT_TOLERANCE, as_tensor, difference, magnitude, ratio
from bitwright.verification.proof import RuntimeProof
from bitwright.verification.runtimes.base import Runtime


def add_defaults(
    proof: RuntimeProof,
    runtime: Runtime,
    file: LoadedFile,
    feeds: Mapping[str, np.ndarray],
    results: Mapping[str, np.ndarray],
) -> None:
    """Note the runtime's settings if they may matter, and how far its outputs are from ``results`` without them."""
    if not runtime.affects({operator.runs_as for operator in proof.operators}):
        return
    proof.settings = dict(runtime.settings)
    names = " and ".join(f"{name}={value}" for name, value in runtime.settings.items())
    try:
        others = runtime.open(file, as_is=True)(feeds)
    except RuntimeDied:
        raise
    except VerifyError as error:  # this does not invalidate what was measured with the settings
        proof.notes.append(f"without {names}: {error}")
        return
    worst = max((_apart(as_tensor(results[name]), as_tensor(others[name])) for name in others), default=0.0)
    if worst > FLOAT_TOLERANCE:
        proof.notes.append(
            f"opened without {names}, outputs differ by up to {worst:.2%} of their magnitude: {runtime.by_default}"
        )


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return ratio(float(difference(ours, theirs).max()), magnitude(ours)) if ours.numel() else 0.0
