"""`RunProcess`: the process of a run, and `RunFiles`, its files in the directory of the service."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianflow.config import loading as config_loading
from tianflow.rundir.audit_log import NAME
from tianflow.rundir.control_file import ControlFile
from tianflow.rundir.summary import EOF, SUMMARY, read_summary

TAIL = 4096
"""Bytes at the end of a log that explain why a process ended."""
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

    def config(self, name: str) -> Path:
        """Config that the run is started with. The suffix is unique, because a run may be called
        "tokens".
        """
        return self.own / f"{name}.config.toml"

    def log(self, name: str) -> Path:
        """Output of its process."""
        return self.own / f"{name}.log"

    def summary(self, name: str) -> dict[str, Any] | None:
        """Summary of its latest process; None if there is no valid one."""
        return read_summary(self.run(name))

    def audit(self, name: str) -> Iterator[dict[str, Any]]:
        """Every change and action of the run, oldest first, without damaged lines."""
        with suppress(OSError), (self.run(name) / NAME).open("rb") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        yield entry

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

    def tail(self, name: str) -> str:
        """The end of its log."""
        try:
            with self.log(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
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
    (directory / SUMMARY).unlink(missing_ok=True)  # it belongs to an earlier process
    if any((directory / "checkpoints").glob("v*")):
        return ["--resume", str(directory)]
    if (last := directory / config_loading.CONFIG_FILE).is_file():
        last.replace(start)  # the last settings, with live changes
    elif not start.is_file():
        config_loading.write_toml(start, config_loading.load_config(config))
    if directory.exists():
        shutil.rmtree(directory)  # it ended before its first checkpoint
    return [str(start)]
