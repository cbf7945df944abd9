"""GPUs and CPU cores of this machine, found without PyTorch, whose import takes seconds.

Device files are looked for once, when this module is imported: a look may block.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of the driver."""
HAS_GPU = any(Path(node).exists() for node in GPU_NODES)
"""True if the machine has an NVIDIA GPU."""
GPUS = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))
"""Number of NVIDIA GPUs, by their device files nvidia0 and so on; 0 if it is not known."""
DRIVER = "libcuda.so.1"
BLOCKING_SYNC = 4
"""CU_CTX_SCHED_BLOCKING_SYNC of the driver."""


def on_gpu(device: str, processes: int = 1) -> bool:
    """True if ``processes`` with the setting ``device`` (auto, cpu, cuda, cuda:N) use GPUs."""
    if device != "auto":
        return device.startswith("cuda")
    return HAS_GPU and processes <= max(1, GPUS)


def sleep_in_waits(index: int) -> bool:
    """Let threads of this process sleep while they wait for GPU ``index``, instead of computing.

    It holds for every wait of the process: for results, for copies and for other ranks. False: the
    driver does not support it.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
        device = ctypes.c_int()
        return not (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDevicePrimaryCtxSetFlags_v2(device, BLOCKING_SYNC)
        )
    except (OSError, AttributeError):
        return False


def cores() -> int:
    """Number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
