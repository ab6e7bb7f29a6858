"""What this CPU can do, as far as it changes what integer kernels compute."""

import platform
from pathlib import Path


def has_vnni() -> bool:
    """Whether products of bytes are added in 32 bits."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "avx512_vnni" in flags or "avx_vnni" in flags
