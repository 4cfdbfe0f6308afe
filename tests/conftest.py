"""What every test shares: no network, one thread, Triton's interpreter where no GPU test is asked for, and a stand-in for the run.

Environment variables are set before torch or triton is imported by a test module.
"""

from __future__ import annotations

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on two busy cores are slower than one
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Thousands of tests and what they imported stay to the end: no later collection needs to look at them."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect GPU tests where no CUDA device is visible, whatever -m says."""
    from specgen.validate import cuda_devices

    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and cuda_devices() == 0:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
