"""Settings for all tests: one thread, seeded randomness, deterministic hypothesis."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "bitwright",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("bitwright")


@pytest.fixture
def own_schedules():
    """Forget the schedules that a test registers: they would run in every test after it."""
    from bitwright.graph import SCHEDULES

    known = set(SCHEDULES)
    yield
    for name in set(SCHEDULES) - known:
        SCHEDULES.unregister(name)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
