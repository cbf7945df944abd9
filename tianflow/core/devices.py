"""GPUs and CPU cores of this machine, found without PyTorch: an import would take seconds."""

from __future__ import annotations

import os
from pathlib import Path

GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of the driver."""
GPU_FOLDER = Path("/dev")
"""Where each NVIDIA GPU has a device file, nvidia0 and so on."""


def has_gpu() -> bool:
    """True if the machine has an NVIDIA GPU."""
    return any(Path(node).exists() for node in GPU_NODES)


def gpus() -> int:
    """Number of NVIDIA GPUs; 0 if it is not known."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in GPU_FOLDER.glob("nvidia*"))


def on_gpu(device: str, processes: int = 1) -> bool:
    """True if ``processes`` with the setting ``device`` (auto, cpu, cuda, cuda:N) use GPUs."""
    if device != "auto":
        return device.startswith("cuda")
    return has_gpu() and processes <= max(1, gpus())


def cores() -> int:
    """Number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
