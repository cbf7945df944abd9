"""Description of the machine: hardware, versions, and the load of other processes during a
measurement.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "tianflow",
    "torch",
    "numpy",
    "gymnasium",
    "ale-py",
    "stable-baselines3",
    "pyzmq",
    "mpi4py",
    "mpich",
    "psutil",
)
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that make a numerical library optimise for another machine."""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread in each process. Networks this small are slower with two, and much less steady."""

_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq of the first line of /proc/stat
_STOLEN = 7


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for a benchmark process: without `UNSET`, with one thread, and with
    this checkout first on the path.
    """
    path = os.pathsep.join(
        part
        for part in (str(ROOT), str(ROOT / "controllers"), environment.get("PYTHONPATH", ""))
        if part
    )
    return (
        {name: value for name, value in environment.items() if name not in UNSET}
        | THREADS
        | {"PYTHONPATH": path}
    )


def describe() -> dict[str, object]:
    """Describe the machine by names and numbers that do not identify its owner."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count() or len(os.sched_getaffinity(0)),
        "gpus": gpus(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {kernel_version(platform.release())}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "revision": _git("rev-parse", "--short=12", "HEAD") or "unknown",
        "modified": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        ),
        "threads": dict(THREADS),
    }


def kernel_version(release: str) -> str:
    """Return the version number alone. The text after a dash names the builder."""
    return release.partition("-")[0]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs that this process may use."""
    return list(_usable_gpus("name").values())


def cards() -> str:
    """Describe the driver of the GPUs that this process may use, and the links between them."""
    driver = ", ".join(dict.fromkeys(_usable_gpus("driver_version").values()))
    if not driver:
        return "no GPU"
    names = [f"GPU{index}" for index in _usable_gpus("name")]
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in _nvidia_smi("topo", "-m")]
    columns = rows[0] if rows else []
    links = [
        f"{row[0]}-{columns[place]} {link}"
        for row in rows[1:]
        for place, link in enumerate(row[1 : 1 + len(columns)])
        if row[0] in names and columns[place] in names and row[0] < columns[place]
    ]
    return ", ".join([f"driver {driver}", *links])


def _usable_gpus(field: str) -> dict[str, str]:
    """Return ``field`` of the GPUs that this process may use, by index."""
    lines = _nvidia_smi(f"--query-gpu=index,{field}", "--format=csv,noheader")
    found = dict(line.split(", ", 1) for line in lines if ", " in line)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {
        index: value
        for index, value in found.items()
        if visible is None or index in visible.split(",")
    }


def _nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that ``nvidia-smi`` prints; none without it."""
    try:
        done = subprocess.run(
            ("nvidia-smi", *arguments), capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return []
    return done.stdout.splitlines()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True, slots=True)
class Load:
    """Average load on the cores that this process may use: cores used by other processes, and cores
    taken by the hypervisor.
    """

    foreign_cores: float
    stolen_cores: float


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds so far: of all processes, stolen by the hypervisor, and of this process with all
    its reaped descendants.
    """

    at: float
    busy: float
    stolen: float
    own: float


def read_cpu() -> Reading:
    """Read the counters now. Only the cores that this process may use count, because other cores
    can run unrelated work.
    """
    fields = _core_times(Path("/proc/stat").read_text(encoding="utf-8"), os.sched_getaffinity(0))
    ticks = os.sysconf("SC_CLK_TCK")
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return Reading(
        time.monotonic(), sum(fields[i] for i in _BUSY) / ticks, fields[_STOLEN] / ticks, own
    )


def _core_times(stat: str, cores: Collection[int]) -> list[int]:
    """Sum the columns of ``/proc/stat`` over ``cores``, in clock ticks."""
    wanted = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in stat.splitlines() if line.split(" ", 1)[0] in wanted]
    return [sum(map(int, column)) for column in zip(*(line[1:] for line in lines), strict=True)]


def load_between(before: Reading, after: Reading) -> Load:
    """Return the load of other processes from ``before`` to ``after``."""
    seconds = max(1e-9, after.at - before.at)
    foreign = (after.busy - before.busy - (after.own - before.own)) / seconds
    return Load(
        round(max(0.0, foreign), 3), round(max(0.0, after.stolen - before.stolen) / seconds, 3)
    )


def wait_until_quiet(
    patience_s: float,
    *,
    most_cores: float = 0.1,
    poll_s: float = 1.0,
    read: Callable[[], Reading] = read_cpu,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until other processes use less than ``most_cores``, for at most ``patience_s`` seconds.
    Return their last measured use.
    """
    end = read().at + patience_s
    while True:
        before = read()
        if before.at >= end:
            return float("nan")
        sleep(poll_s)
        foreign = load_between(before, read()).foreign_cores
        if foreign < most_cores or read().at >= end:
            return foreign
