"""Everything here needs a CUDA device, and says so where there is none."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def number_of_gpus() -> int:
    """Count the GPUs without importing torch into the test process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listed = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, timeout=30)
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "gpu" in item.path.parts]
    if here and number_of_gpus() == 0:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine (nvidia-smi finds none)"))
