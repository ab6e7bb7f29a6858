"""Fashion-MNIST as Debian ships it: ``apt-get install dataset-fashion-mnist``, or name the folder in FASHION_MNIST."""

import gzip
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))


class Split(NamedTuple):
    """Images (n, 1, 28, 28) of mean 0 and deviation 1, and their classes."""

    images: Tensor
    labels: Tensor


def load(name: str) -> Split:
    """The split ``train`` (60,000 images) or ``t10k`` (10,000)."""
    images = _read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    labels = _read(f"{name}-labels-idx1-ubyte.gz", 8)
    return Split((images.float() / 255 - 0.2860) / 0.3530, labels.long())


def _read(name: str, header: int) -> Tensor:
    path = FOLDER / name
    if not path.exists():
        raise SystemExit(f"{path} is missing: apt-get install dataset-fashion-mnist, or set FASHION_MNIST")
    data = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)[header:]
    return torch.from_numpy(data.copy())
