"""A user's module, as the command line is given one: models, data and evaluations, good ones and bad ones."""

import time
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    """A convolution with BatchNorm and ReLU, a residual add, and a classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.body(x))
        return self.head(x.mean((2, 3), dtype=torch.float32))


class Untraceable(nn.Module):
    """Asks for the data of a tensor: runs as written, its submodules are captured separately."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, x):
        return self.inner(x) if x.sum().item() > -1e9 else self.inner(-x)


def _images(count=4, seed=1):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def build():
    torch.manual_seed(0)
    return Net()


instance = build()


def build_untraceable():
    torch.manual_seed(0)
    return Untraceable()


def build_dict():
    return {"a": 1}


def build_broken():
    raise RuntimeError("the checkpoint\nis missing")


def example_inputs():
    return _images(2)


def wrong_example():
    return torch.randn(2, 5, 8, 8)


def calibration():
    """Batches of images and labels, as a data loader has them."""
    return [(_images(seed=s), torch.zeros(4, dtype=torch.long)) for s in range(3)]


def generated():
    yield from calibration()


def empty():
    return []


def number():
    return 3


def broken_data():
    yield _images()
    raise OSError("disk is gone")


def slow_data():
    """Says that it has begun, then takes its time."""
    yield _images()
    Path("calibrating").touch()
    for _ in range(600):
        time.sleep(0.1)
        yield _images()


def twelve_batches():
    """Takes its time as long as there is a file that says so."""
    for number in range(12):
        if Path("slow").exists() and number == 5:
            Path("calibrating").touch()
            time.sleep(1)
        yield _images(seed=number) * (number + 1)


def _agreement(model):
    """How often the model chooses what the float model does."""
    x = _images(64, seed=9)
    return (model(x).argmax(1) == build().eval()(x).argmax(1)).float().mean()


def evaluate(model):
    print("evaluating")  # goes to stderr when stdout is for JSON
    model.eval()
    return {"agreement": _agreement(model), "samples": 64}


def evaluate_number(model):
    return _agreement(model)


def evaluate_text(model):
    return "good"


def evaluate_broken(model):
    raise KeyError("logits")


def evaluate_worse(model):
    """Gives the float model more than any other."""
    return 0.9 if type(model) is Net else 0.5


def evaluate_fickle(model):
    return {"accuracy": 1} if type(model) is Net else {"loss": 0}


_falling = []


def evaluate_falling(model):
    """Gives the first model that it sees more than any other."""
    _falling.append(model)
    return 1.0 if len(_falling) == 1 else 0.5
