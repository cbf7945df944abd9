"""``tianflow doctor``: checks this machine and installation, each finding with advice."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tianflow import plugins
from tianflow.planning.memory import machine_memory, usable_memory
from tianflow.rundir.control_file import NAME, ControlFile

REQUIRED = ("torch", "numpy", "gymnasium", "aiohttp", "msgpack", "pydantic", "safetensors")
EXTRAS = {
    "atari": "ale_py",
    "envpool": "envpool",
    "mlflow": "mlflow",
    "mujoco": "mujoco",
    "onnx": "onnxscript",
    "plots": "matplotlib",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "video": "moviepy",
    "wandb": "wandb",
}
MEMORY_PROBE = 16 * 2**20
MINIMUM_FREE = 2**28
"""Free disk space, in bytes, below which there is a warning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``advice`` is "" if there is nothing to do."""

    name: str
    level: Literal["ok", "warning", "problem"]
    value: str
    advice: str = ""


def examine(runs_dir: Path, cgroup: Path = Path("/sys/fs/cgroup")) -> list[Finding]:
    """All findings. Nothing is changed or started. ``cgroup`` is the mount point of cgroup version
    2.
    """
    return [
        Finding("python", "ok", platform.python_version()),
        *(package(name) for name in REQUIRED),
        *(extra(name, module) for name, module in EXTRAS.items()),
        cores(cgroup),
        memory(cgroup),
        shared_memory(),
        *gpus(),
        bf16(Path("/proc/cpuinfo")),
        threads(os.environ.get("OMP_NUM_THREADS")),
        descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        directory(runs_dir),
        *runs(runs_dir),
    ]


def package(name: str) -> Finding:
    """Version of a required package."""
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "problem", "not installed", f"pip install {name}")


def extra(name: str, module: str) -> Finding:
    """Whether an optional package is installed."""
    installed = importlib.util.find_spec(module) is not None
    return Finding(
        f"extra {name}",
        "ok",
        "installed" if installed else f"not installed ({plugins.install_line(name)})",
    )


def cores(cgroup: Path) -> Finding:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, period = [*_words(cgroup / "cpu.max"), "max", "1"][:2]
    usable = affinity if quota == "max" else min(affinity, int(quota) / int(period))
    value = f"{usable:g} usable of {os.cpu_count()}"
    if usable < 2:
        return Finding(
            "cpu cores",
            "warning",
            value,
            "allow more cores: actors and the learner share one",
        )
    return Finding("cpu cores", "ok", value)


def memory(cgroup: Path) -> Finding:
    """Memory of the machine, or the limit of the control group."""
    usable = usable_memory(cgroup)
    value = f"{usable / 2**30:.1f} GiB usable of {machine_memory() / 2**30:.1f}"
    return (
        Finding("memory", "ok", value)
        if usable >= 2**31
        else Finding("memory", "warning", value, "use fewer actors or a smaller replay")
    )


def shared_memory() -> Finding:
    """Whether anonymous memory can be created, sized, mapped and written, as channels need it."""
    try:
        descriptor = os.memfd_create("tianflow-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, MEMORY_PROBE)
            with mmap.mmap(descriptor, MEMORY_PROBE) as view:
                view[-1:] = b"x"
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return Finding(
            "shared memory",
            "problem",
            f"memfd_create: {error}",
            "use Linux with memfd_create, or the inline launcher",
        )
    return Finding("shared memory", "ok", f"memfd_create, {MEMORY_PROBE // 2**20} MiB tried")


def gpus() -> list[Finding]:
    """Whether PyTorch finds GPUs and can compute on them. If so, the precisions that are fast
    there, and whether slots can be pinned.
    """
    try:
        import torch
    except ImportError as error:
        problem = f"PyTorch cannot be imported: {error}"
        return [Finding("gpu", "problem", problem, "reinstall torch")]
    if not torch.cuda.is_available():
        return [Finding("gpu", "ok", "none; the learner uses the CPU")]
    try:
        torch.ones(2, device="cuda").sum().item()
    except RuntimeError as error:
        return [
            Finding(
                "gpu",
                "problem",
                f"found, but unusable: {str(error).splitlines()[0]}",
                "install a driver that fits this build of PyTorch",
            )
        ]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [Finding("gpu", "ok", ", ".join(names)), gpu_precision(), pinning()]


def gpu_precision() -> Finding:
    """Precisions that the first GPU computes fast. PyTorch has found it."""
    import torch

    fast = torch.cuda.get_device_capability(0) >= (8, 0)
    value = "tf32 and bf16 are fast" if fast else "fp32; tf32 and bf16 are not fast on this card"
    return Finding("gpu precision", "ok", value)


def pinning() -> Finding:
    """Whether memory of slots can be pinned, so that the first GPU copies out of it by itself."""
    import torch

    descriptor = os.memfd_create("tianflow-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, MEMORY_PROBE)
        memory = torch.frombuffer(mmap.mmap(descriptor, MEMORY_PROBE), dtype=torch.uint8)
    finally:
        os.close(descriptor)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    refusal = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if refusal:
        advice = "allow locked memory (ulimit -l); without it the CPU copies each batch"
        return Finding("pinned slots", "warning", f"CUDA error {refusal}", advice)
    runtime.cudaHostUnregister(memory.data_ptr())
    return Finding("pinned slots", "ok", f"{MEMORY_PROBE // 2**20} MiB tried")


def bf16(cpuinfo: Path) -> Finding:
    """Whether the CPU has native bfloat16."""
    found = sorted({"avx512_bf16", "amx_bf16", "bf16"} & set(_words(cpuinfo)))
    return Finding("cpu bf16", "ok", ", ".join(found) or "no; bfloat16 is emulated and slow")


def threads(setting: str | None) -> Finding:
    """Value of OMP_NUM_THREADS."""
    if setting is None or setting.isdecimal():
        return Finding("OMP_NUM_THREADS", "ok", setting or "not set")
    return Finding("OMP_NUM_THREADS", "warning", repr(setting), "set a whole number, or unset it")


def descriptors(limit: int) -> Finding:
    """Limit of open files of one process."""
    if limit != resource.RLIM_INFINITY and limit < 1024:
        return Finding(
            "file descriptors", "warning", str(limit), "run ulimit -n 4096 before many actors"
        )
    return Finding(
        "file descriptors", "ok", "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    )


def directory(runs_dir: Path) -> Finding:
    """Whether the directory of runs can be written, and its free space."""
    existing = next(
        (path for path in (runs_dir.absolute(), *runs_dir.absolute().parents) if path.exists()),
        Path("/"),
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            "runs directory",
            "problem",
            f"{str(existing)!r} is not writable",
            "use another directory with --runs-dir",
        )
    free = shutil.disk_usage(existing).free
    value = f"{free / 2**30:.1f} GiB free"
    if free < MINIMUM_FREE:
        return Finding(
            "runs directory",
            "warning",
            value,
            "free some space: checkpoints are lost on a full disk",
        )
    return Finding("runs directory", "ok", value)


def runs(runs_dir: Path) -> list[Finding]:
    """Active runs, and control files of runs that crashed."""
    found: list[Finding] = []
    for path in sorted(runs_dir.glob(f"*/{NAME}")):
        file, name = ControlFile.read(path.parent), f"run {path.parent.name}"
        if file is None:
            found.append(Finding(name, "warning", f"{NAME} cannot be read", f"remove {path}"))
        elif file.alive:
            found.append(Finding(name, "ok", f"active, {file.address}"))
        else:
            found.append(
                Finding(
                    name,
                    "warning",
                    "crashed",
                    f"tianflow train --resume {path.parent.name}",
                )
            )
    return found or [Finding("runs", "ok", f"none is active in {str(runs_dir)!r}")]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []
