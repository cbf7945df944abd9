"""The wall clock of a run. It jumps on request: the library of ``clock.c`` is preloaded."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")
NANOSECONDS = 10**9


class UnavailableError(Exception):
    """Raised when this machine cannot provide a part of the storm. The message is the reason."""


class WallClock:
    """The wall clock of processes that start with `environment`.

    Args:
        folder: for the compiled library and the file with the offset.

    Raises:
        UnavailableError: there is no C compiler, or it fails.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise UnavailableError("no C compiler was found (gcc or cc)")
        library, offset = folder / "storm_clock.so", folder / "storm_clock.offset"
        done = subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UnavailableError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        offset.write_bytes(struct.pack("q", 0))
        with offset.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "STORM_CLOCK": str(offset),
        }

    def shift(self, seconds: float) -> None:
        """Move the clock to ``seconds`` beside the true time."""
        self._memory[:8] = struct.pack("q", int(seconds * NANOSECONDS))
