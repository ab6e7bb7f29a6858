"""CPU features that change what integer kernels compute."""

import platform
from pathlib import Path

from bitwright.errors import UnknownNameError, suggest

CPUS = {"vnni": True, "amx": True, "arm64": True, "avx512": False, "avx2": False, "sse4": False}


def adds_in_32_bits(cpu: str = "") -> bool:
    """Whether a kind of CPU adds products of bytes in 32 bits: one of ``CPUS``, by default this machine's."""
    if cpu and cpu not in CPUS:
        raise UnknownNameError(f"unknown kind of CPU {cpu!r}{suggest(cpu, CPUS)}")
    return CPUS[cpu] if cpu else has_vnni()


def has_vnni() -> bool:
    """Whether products of bytes are added in 32 bits."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "avx512_vnni" in flags or "avx_vnni" in flags
