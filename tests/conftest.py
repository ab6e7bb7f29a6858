"""Settings for all tests: one thread, seeded randomness, deterministic hypothesis."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from bitwright.signals import signal_stack_kept

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
def own_plugins():
    """Forget what a test registers: schedules would run in every test after it, and lists would be longer."""
    from bitwright.backends import BACKENDS
    from bitwright.compat.quantrans import QUANLAYERS, QUANTRANSFORMERS
    from bitwright.graph import SCHEDULES
    from bitwright.methods import METHODS
    from bitwright.observers import OBSERVERS
    from bitwright.simulation import SIMULATED_RUNTIMES
    from bitwright.verification import CONSTRAINTS

    plugins = (SIMULATED_RUNTIMES, CONSTRAINTS, BACKENDS, METHODS, OBSERVERS)
    registries = (*plugins, QUANLAYERS, QUANTRANSFORMERS, SCHEDULES)
    known = {registry: set(registry) for registry in registries}
    yield
    for registry, names in known.items():
        for name in set(registry) - names:
            registry.unregister(name)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signal_stack_kept():
    """Survive signals after tests that compile models with OpenVINO themselves."""
    with signal_stack_kept():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip what fails only because OpenVINO fails when oneDNN is limited to older instructions than the CPU has."""
    report = yield
    why = "OpenVINO then mixes kernels for this CPU and for older ones, and may fail"
    if report.failed and "ONEDNN_MAX_CPU_ISA" in os.environ and why in report.longreprtext:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], why)
    return report
