"""Crashes of runtimes that are not Bitwright's, and only happen in an unusual environment."""

import os

import pytest

from bitwright.verification import Proof


def skip_crash_of_older_kernels(proof: Proof) -> None:
    """Skip where OpenVINO crashes at a normalization because oneDNN is held to older instructions than the CPU has."""
    crash = proof.runtimes["openvino"].crash if "openvino" in proof.runtimes else ""
    if "ONEDNN_MAX_CPU_ISA" in os.environ and "Normalization" in crash:
        assert not proof.ok
        pytest.skip(crash)
