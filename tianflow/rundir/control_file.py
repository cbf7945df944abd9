"""``control.json`` in a run's directory: how other programs find a run that goes on, and whether it
still does.

A service that holds many runs is found in the same way, by ``service.json`` in the directory of its
runs.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "control.json"
SERVICE = "service.json"


def process_start_time(pid: int) -> int | None:
    """When the process began, in clock ticks since boot (field 22 of its stat); None where there is
    no such process, or no /proc.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, which may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    # A zombie has ended; only its parent has not looked yet.
    return None if fields[0] in {"Z", "X"} else int(fields[19])


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFile:
    """Where a run answers (``run`` is "" for a service). ``pid`` with ``start_time`` names one
    process for ever: a pid alone is used again.

    ``token`` allows everything, ``read_token`` looking; both are "" where no token is asked for.
    """

    run: str
    pid: int
    start_time: int | None
    address: str
    token: str
    read_token: str

    @classmethod
    def read(cls, directory: Path, name: str = NAME) -> ControlFile | None:
        """What ``directory`` holds; None when there is none, or none that can be read."""
        try:
            return cls(**json.loads((directory / name).read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    @property
    def alive(self) -> bool:
        """True while the very process that wrote it is there."""
        started = process_start_time(self.pid)
        return started is not None and started == self.start_time

    def kill(self) -> None:
        """End that process now, if it is still there."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def write(self, directory: Path, name: str = NAME) -> None:
        """Put it into ``directory``, whole or not at all, readable by its owner only."""
        temporary = directory / f".{name}.{self.pid}"
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2)
            file.write("\n")
        temporary.replace(directory / name)

    def remove(self, directory: Path, name: str = NAME) -> None:
        """Take it away, unless another process has put its own in its place."""
        if ControlFile.read(directory, name) == self:
            (directory / name).unlink(missing_ok=True)
