"""`ControlFile`: ``control.json`` in the directory of a run, by which other programs find an active
run.

A service has a file of the same form, ``service.json`` in the directory of its runs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import urllib.parse
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "control.json"
SERVICE = "service.json"
LARGEST = 64 * 1024
"""Bytes of a file that are read at most."""
ANSWER_S = 2.0
"""Seconds within which another machine accepts a connection."""


def process_start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (field 22 of its stat); None if the process
    does not exist, or without /proc.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, which may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    # A zombie has ended; its parent has not read its exit status yet.
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _machine_id() -> str:
    """An id of this machine since it was booted; "" without /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


MACHINE = _machine_id()
"""It is read once: an event loop must not read files, and a process does not outlive a boot."""


def _listens(address: str) -> bool:
    """True if a server accepts connections at an HTTP address."""
    try:
        parts = urllib.parse.urlsplit(address)
        with socket.create_connection((parts.hostname or "", parts.port or 80), ANSWER_S):
            return True
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process. A pid alone does not identify it, because a pid is reused."""

    pid: int
    start_time: int | None

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has ``pid`` now."""
        return cls(pid, process_start_time(pid))

    @property
    def alive(self) -> bool:
        """True while the process exists."""
        return self.start_time is not None and process_start_time(self.pid) == self.start_time

    def kill(self) -> None:
        """Kill the process if it exists."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFile:
    """The address and tokens of a run (``run`` is "" for a service).

    ``pid`` and ``start_time`` together identify one process of ``machine``, because a pid is
    reused. ``token`` allows everything, ``read_token`` reading only; both are "" if the server
    requires none.
    """

    run: str
    pid: int
    start_time: int | None
    address: str
    token: str
    read_token: str
    machine: str = MACHINE

    @classmethod
    def read(cls, directory: Path, name: str = NAME) -> ControlFile | None:
        """Read the file in ``directory``; None if it does not exist or is not valid."""
        path = directory / name
        try:
            if not stat.S_ISREG(path.lstat().st_mode):  # a FIFO would wait for ever
                return None
            with path.open("rb") as file:
                found = cls(**json.loads(file.read(LARGEST)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return found if found._possible else None

    @property
    def _possible(self) -> bool:
        """True if every field has its type: another program may have written the file."""
        texts: tuple[object, ...] = (
            self.run,
            self.address,
            self.token,
            self.read_token,
            self.machine,
        )
        numbers = (self.pid, 0 if self.start_time is None else self.start_time)
        return (
            all(isinstance(text, str) and text.isprintable() for text in texts)
            and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
            and self.pid > 0
        )

    @property
    def alive(self) -> bool:
        """True while the process that wrote the file exists. That of another machine, as in a
        directory that several machines share, exists while it accepts connections.
        """
        if self.machine != MACHINE:
            return _listens(self.address)
        return ProcessIdentity(self.pid, self.start_time).alive

    @property
    def authorization(self) -> dict[str, str]:
        """HTTP header with the token."""
        return {"Authorization": f"Bearer {self.token}"}

    def path(self, rest: str = "") -> str:
        """HTTP path of the run, or of a resource of it."""
        return f"/api/v1/runs/{self.run}{rest}"

    def write(self, directory: Path, name: str = NAME) -> None:
        """Write the file into ``directory``, whole or not at all, readable by its owner only."""
        temporary = directory / f".{name}.{self.pid}"
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(self), file, indent=2)
                file.write("\n")
            temporary.replace(directory / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink()  # it holds tokens
            raise

    def remove(self, directory: Path, name: str = NAME) -> None:
        """Remove the file, unless another process has replaced it."""
        if ControlFile.read(directory, name) == self:
            (directory / name).unlink(missing_ok=True)
