"""`RunProcess`: the process of a run, and `RunFiles`, its files in the directory of the service.

A service deletes the directory of a run only on request, and only if a service started the run. It
kills no process that a service did not start.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import shutil
import signal
import sys
import time
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianflow.config import loading as config_loading
from tianflow.core.files import open_regular
from tianflow.errors import CheckpointError, TianflowError
from tianflow.rundir.audit_log import NAME
from tianflow.rundir.control_file import ControlFile, ProcessIdentity
from tianflow.rundir.lock import lock_directory
from tianflow.rundir.summary import EOF, SUMMARY, read_summary

TAIL = 4096
"""Bytes at the end of a log that explain why a process ended."""
SHOWN_TAIL = 64 * 2**10
"""Bytes at the end of a log that a client gets."""
LONGEST_LOG = 4 * 2**20
"""Maximum bytes of a log; then the older half is deleted. A process may write for months."""
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
OWN: Mapping[str, object] = {
    "http.enabled": True,
    "http.host": "127.0.0.1",
    "http.port": 0,
    "http.allowed_hosts": [],
}
"""Settings that the service sets, because only the service is reachable from outside."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
PROBED = 64 * 2**10
"""Bytes that a disk must accept before a run is started on it."""


class DirectoryTakenError(TianflowError):
    """The directory of a run belongs to another user or process. ``starting``: a process is active
    in it that may be one of an earlier service.
    """

    def __init__(self, message: str, *, starting: bool = False) -> None:
        self.starting = starting
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of files in ``runs``, the directory of the runs."""

    runs: Path

    @property
    def own(self) -> Path:
        """Directory of the service itself; a run cannot have this name."""
        return self.runs / ".service"

    @property
    def tokens(self) -> Path:
        """Default path of the tokens."""
        return self.own / "tokens.toml"

    def run(self, name: str) -> Path:
        """Directory of a run."""
        return self.runs / name

    def found(self) -> list[str]:
        """Names of the runs on disk."""
        return sorted(path.parent.name for path in self.runs.glob("*/config.toml"))

    def config(self, name: str) -> Path:
        """Config that the run is started with. The suffix is unique, because a run may be called
        "tokens".
        """
        return self.own / f"{name}.config.toml"

    def log(self, name: str) -> Path:
        """Output of its process."""
        return self.own / f"{name}.log"

    def process(self, name: str) -> Path:
        """Identity of its latest process, so that the next service recognises it."""
        return self.own / f"{name}.process.json"

    def record_process(self, name: str, identity: ProcessIdentity) -> None:
        """Write the identity of the latest process of a run."""
        text = json.dumps({"pid": identity.pid, "start_time": identity.start_time})
        self.process(name).write_text(text, encoding="utf-8")

    def live_process(self, name: str) -> ProcessIdentity | None:
        """The latest process of a run that a service started, if it still exists."""
        try:
            found = ProcessIdentity(**json.loads(self.process(name).read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return found if found.alive else None

    def forget(self, name: str) -> None:
        """Delete what an earlier run of this name left in the directory of the service."""
        for path in (self.config(name), self.process(name)):
            path.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Delete the files of an ended run, and move its directory to `discarded`, if a service
        made it. `discard` deletes it there: a crash between both leaves no half of a run.

        Raises:
            DirectoryTakenError: a process is active in the directory, or another user or process
                made it.
            OSError: the disk refuses.
        """
        directory = self.run(name)
        if os.path.lexists(directory) and self.config(name).is_file():
            if directory.is_symlink():
                raise _not_made_here(directory)
            with _locked(directory):
                made = (directory / config_loading.CONFIG_FILE).is_file()
                if not made and any(directory.iterdir()):
                    raise _not_made_here(directory)
                self.discarded.mkdir(mode=0o700, exist_ok=True)
                directory.rename(self.discarded / f"{name}.{uuid.uuid4().hex}")
        for path in (self.config(name), self.process(name), self.log(name)):
            path.unlink(missing_ok=True)

    @property
    def discarded(self) -> Path:
        """Directory of what is deleted, from which no run is read."""
        return self.own / "deleted"

    def discard(self) -> None:
        """Delete what `remove` moved aside, also before an earlier service was killed. What the
        disk refuses to delete stays for the next call.
        """
        with suppress(OSError):
            for path in self.discarded.iterdir():
                shutil.rmtree(path, ignore_errors=True)

    def require_free(self, name: str, *, first: bool) -> None:
        """Check that a process of this service may use the directory of the run.

        Args:
            name: of the run.
            first: no process of the run has been started before.

        Raises:
            DirectoryTakenError: a process is active in it, or another user or process made it.
        """
        directory = self.run(name)
        if not os.path.lexists(directory):
            return
        with _locked(directory):
            if first and any(directory.iterdir()):
                raise _not_made_here(directory)

    def space_problem(self) -> str:
        """Why the disk accepts no file, or ``""``."""
        path = self.own / ".space"
        try:
            with path.open("wb") as file:
                file.write(bytes(PROBED))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in FULL:
                return f"{str(self.runs)!r}: {error.strerror}; the run starts when there is space"
        finally:
            with suppress(OSError):
                path.unlink()
        return ""

    def summary(self, name: str) -> dict[str, Any] | None:
        """Summary of its latest process; None if there is no valid one."""
        return read_summary(self.run(name))

    def audit(self, name: str) -> Iterator[dict[str, Any]]:
        """Every change and action of the run, oldest first, without damaged lines."""
        with suppress(OSError), open_regular(self.run(name) / NAME) as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        yield entry

    def settings(self, name: str) -> dict[str, Any] | None:
        """The tables of its settings in force, with live changes; None if there are none that can
        be read. Nothing is imported or checked.
        """
        try:
            with open_regular(self.run(name) / config_loading.CONFIG_FILE) as file:
                return tomllib.load(file)
        except (OSError, ValueError, RecursionError):
            return None

    def paused(self, name: str) -> bool:
        """True if the last pause or resume was a pause."""
        actions = [
            entry["action"]
            for entry in self.audit(name)
            if entry.get("action") in ("pause", "resume")
        ]
        return actions[-1:] == ["pause"]

    def trim(self, name: str) -> None:
        """Delete the older half of a log that is too long. The process continues to append; lines
        written meanwhile may be lost.
        """
        with suppress(OSError), self.log(name).open("r+b") as file:
            if (size := file.seek(0, os.SEEK_END)) <= LONGEST_LOG:
                return
            file.seek(size - LONGEST_LOG // 2)
            _, _, newest = file.read().partition(b"\n")
            file.seek(0)
            file.write(newest)
            file.truncate()

    def tail(self, name: str, most: int = TAIL) -> str:
        """The end of its log, at most ``most`` bytes."""
        try:
            with self.log(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - most))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: done, failed or stopped."""

    state: str
    reason: str


class RunProcess:
    """``tianflow train`` of one run. It ends, with a last checkpoint, when its standard input ends,
    so it does not outlive the service.

    Args:
        process: from `start`.
        name: of the run.
        files: of the runs.
    """

    def __init__(self, process: asyncio.subprocess.Process, name: str, files: RunFiles) -> None:
        self._process, self._name, self._files = process, name, files

    @classmethod
    async def start(
        cls, name: str, config: Mapping[str, Any], files: RunFiles, overrides: Mapping[str, object]
    ) -> RunProcess:
        """Start the run, or resume it from its newest checkpoint with its live settings."""
        arguments = await asyncio.to_thread(_arguments, name, config, files)
        settings = [
            f"{path}={config_loading.toml_value(value)}"
            for path, value in {**OWN, **overrides}.items()
        ]
        command = [sys.executable, "-m", "tianflow", "train", *arguments, *settings]
        log = await asyncio.to_thread(files.log(name).open, "ab")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--runs-dir", str(files.runs), "--plain", "--json", "--until-eof"),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the service only, which ends its runs
            )
        finally:
            await asyncio.to_thread(log.close)
        with suppress(OSError):  # a full disk; the lock of the directory still protects the run
            await asyncio.to_thread(
                lambda: files.record_process(name, ProcessIdentity.of(process.pid))
            )
        return cls(process, name, files)

    @property
    def control(self) -> ControlFile | None:
        """Its control file; None until it answers. Reads a file."""
        found = ControlFile.read(self._files.run(self._name))
        return found if found is not None and found.pid == self._process.pid else None

    def release(self) -> None:
        """Ask it to end with a last checkpoint."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill it; its hosts end with it."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> RunOutcome | None:
        """Wait for its end. None: it was killed or released, and can be resumed."""
        code = await self._process.wait()
        return await asyncio.to_thread(self._outcome, code)

    def _outcome(self, code: int) -> RunOutcome | None:
        summary = self._files.summary(self._name)
        if summary is not None:
            if summary.get("reason") == EOF:
                return None
            return RunOutcome(
                str(summary.get("state", "failed")),
                str(summary.get("error") or summary.get("reason") or ""),
            )
        if code < 0 or code == 128 + signal.SIGHUP:
            return None
        if code in INTERRUPTED:
            return RunOutcome("stopped", signal.Signals(code - 128).name)
        return RunOutcome(
            "failed", self._files.tail(self._name) or f"its process ended with code {code}"
        )


def _arguments(name: str, config: Mapping[str, Any], files: RunFiles) -> list[str]:
    """Arguments of ``train``; prepares the directory for them."""
    directory, start = files.run(name), files.config(name)
    if os.path.lexists(directory):
        with _locked(directory):
            (directory / SUMMARY).unlink(missing_ok=True)  # it belongs to an earlier process
            if any((directory / "checkpoints").glob("v*")):
                return ["--resume", str(directory)]
            if any(directory.iterdir()):
                if not start.is_file():
                    raise _not_made_here(directory)
                if (last := directory / config_loading.CONFIG_FILE).is_file():
                    shutil.copyfile(last, start)  # the last settings, with live changes
                _move_aside(directory, files.log(name))
    if not start.is_file():
        config_loading.write_toml(start, config_loading.load_config(config))
    return [str(start)]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory of a run while the context is open."""
    try:
        lock = lock_directory(directory)
    except CheckpointError as error:
        contact = ControlFile.read(directory)
        raise DirectoryTakenError(
            str(error), starting=contact is None or not contact.alive
        ) from error
    except OSError as error:
        raise DirectoryTakenError(
            f"{str(directory)!r} cannot be used: {error.strerror}; move it away, or submit under "
            "another run.name"
        ) from error
    try:
        yield
    finally:
        os.close(lock)


def _not_made_here(directory: Path) -> DirectoryTakenError:
    return DirectoryTakenError(
        f"{str(directory)!r} was not made by this service, and was not changed; move it away, or "
        "submit under another run.name"
    )


def _move_aside(directory: Path, log: Path) -> None:
    """Rename the directory of a run without a checkpoint, and name the new one in the run's log."""
    stem = directory.name[:50]  # a name of a run has at most 64 characters
    aside = next(
        path
        for number in itertools.count(1)
        if not os.path.lexists(path := directory.with_name(f"{stem}.before-{number}"))
    )
    directory.rename(aside)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with log.open("a", encoding="utf-8") as file:
        file.write(
            f"{stamp} {str(directory)!r} has no checkpoint; it was moved to {str(aside)!r}, and "
            "the run starts again\n"
        )
