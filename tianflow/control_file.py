"""``runs/<id>/control.json``: how a command finds a run that is going on, and knows that it still is."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "control.json"


def process_start_time(pid: int) -> int | None:
    """When process ``pid`` started, in clock ticks since boot (field 22 of ``/proc/<pid>/stat``); None if there is none.

    A process id is used again sooner or later; together with its start time it is unique on a machine until it is rebooted.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may itself hold spaces and brackets
    return None if fields[0] in {"Z", "X"} else int(fields[19])


@dataclass(frozen=True, slots=True)
class ControlFile:
    """Who runs a run, and where it listens.

    Attributes:
        run: the run's id.
        pid: the coordinator's process id.
        start_time: its `process_start_time`.
        address: ``http://host:port`` of its control server.
        token: the bearer token that its requests need; this is why the file is readable by its owner only.
    """

    run: str
    pid: int
    start_time: int
    address: str
    token: str

    @property
    def alive(self) -> bool:
        """True while the very process that wrote this is there."""
        return process_start_time(self.pid) == self.start_time

    def write(self, directory: Path) -> None:
        """Put the file into ``directory``: whole or not at all, mode 0600 from its first byte on."""
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".control-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        Path(temporary).replace(directory / NAME)


def read(path: Path) -> ControlFile | None:
    """The control file at ``path``; None when it is gone, not ours to read, or no control file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return ControlFile(str(values["run"]), int(values["pid"]), int(values["start_time"]), str(values["address"]), str(values["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def alive(runs_dir: Path) -> Iterator[ControlFile]:
    """Control files of all runs under ``runs_dir`` that are going on, by name."""
    for path in sorted(runs_dir.glob(f"*/{NAME}")):
        found = read(path)
        if found is not None and found.alive:
            yield found
