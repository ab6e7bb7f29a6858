"""timm, torchvision and transformers, installed next to the pinned torch, in a folder that only the zoo uses."""

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def install(folder: Path) -> Path:
    """Install the libraries into ``folder`` unless they are there, without their dependencies: never another torch."""
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        print(f"Installing timm, torchvision and transformers into {folder}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), "-r", str(REQUIREMENTS)], check=True)
        stamp.write_text(REQUIREMENTS.read_text())
    return folder


def declare_torchvision_operators() -> None:
    """Let torchvision be imported where its compiled part does not load: PyPI has it for CUDA only.

    On import it describes two of its operators, which must exist. They are never called here.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[object] = []  # a library that is collected takes its operators with it
