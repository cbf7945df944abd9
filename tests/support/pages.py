"""A reader of the pages in ``docs/``: it writes their files, runs their commands and compares the
output with the page.

- A fence that begins with ``# NAME.py`` or ``# NAME.toml`` is a file of that name.
- In a ``console`` fence a line that begins with ``$`` is a command. The lines under it must appear
  in its output, in that order. ``...`` matches any text. A command that ends in ``&`` runs in the
  background until the page ends; the reader waits until it trains. It waits until
  ``tianflow env-server`` or ``tianflow serve`` listens, and until a run that has nodes answers, for
  which a later ``tianflow node`` lets it train.
  A run in the background trains slowly, which leaves the cores to the commands beside it.
  The reader stops servers at the end of the page.
- Every other ``python`` fence is a program. A ``text`` fence is ignored.

With a `PreparedProcess`, programs and commands of ``tianflow`` run in forks of it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from tests.support.paths import ROOT
from tests.support.prepared import PreparedProcess
from tianflow.errors import TianflowError

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
NAME = re.compile(r"# ([\w.-]+\.(?:py|toml))")
QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
SHELL = re.compile(r"[|&;<>()$`\\\"'*?~#]")
"""Characters outside quotes that mean something to a shell."""
COMMAND_S = 150.0
"""Seconds; far more than any command of a page takes, on a busy machine."""
LANGUAGES = ("console", "python", "toml", "text")


@dataclass(frozen=True)
class Command:
    """One command of a console, and the lines that its output must have."""

    line: str
    expected: tuple[str, ...]

    @property
    def in_background(self) -> bool:
        return self.line.endswith("&") and not self.line.endswith("&&")

    @property
    def words(self) -> list[str] | None:
        """Words of a command of ``tianflow`` that needs no shell but for ``2>&1`` and ``|| true``;
        None for other commands.
        """
        line = self.line.removesuffix(" || true").removesuffix(" 2>&1")
        if not line.startswith("tianflow ") or SHELL.search(QUOTED.sub("", line)):
            return None
        return shlex.split(line)

    @property
    def serves(self) -> bool:
        return self.line.startswith(("tianflow env-server ", "tianflow serve "))

    @property
    def trains(self) -> bool:
        return self.line.startswith("tianflow train ")

    @property
    def is_node(self) -> bool:
        return self.line.startswith("tianflow node ")

    @property
    def needs_nodes(self) -> bool:
        return "placement.launcher=nodes" in self.line


@dataclass(frozen=True)
class Block:
    """One fence: its language, its text, and the line of the page at which it begins."""

    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        """Name of the file that the fence holds; "" for other fences."""
        found = NAME.match(self.text)
        return found[1] if found else ""

    @property
    def commands(self) -> list[Command]:
        """Commands of a console fence."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line[2:].strip(), []))
            elif line.strip():
                found[-1][1].append(line.strip())
        return [Command(line, tuple(expected)) for line, expected in found]


def blocks(text: str) -> list[Block]:
    """All fences of a page, in order."""
    return [
        Block(token.info.strip(), token.content, (token.map or [0])[0] + 1)
        for token in MarkdownIt().parse(text)
        if token.type == "fence"
    ]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of all tables of a page, without heads."""
    row: list[str] = []
    inside = False
    for token in MarkdownIt().enable("table").parse(text):
        if token.type == "td_open":
            inside = True
        elif token.type == "inline" and inside:
            row.append(token.content)
            inside = False
        elif token.type == "tr_close":
            if row:
                yield row
            row = []


def unseen(expected: tuple[str, ...], output: str) -> str | None:
    """The first of the ``expected`` lines that ``output`` does not have after the lines before it;
    None if it has all of them.
    """
    lines = iter(output.splitlines())
    for wanted in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in wanted.split("...")))
        if not any(pattern.fullmatch(line.strip()) for line in lines):
            return wanted
    return None


class PageError(AssertionError):
    """A reader of the page cannot continue here."""


def _judge(label: str, code: int, out: str, err: str, expected: tuple[str, ...]) -> None:
    seen = f"{label}\n--- stdout\n{out[-3000:]}\n--- stderr\n{err[-3000:]}"
    if code:
        raise PageError(f"exit code {code}: {seen}")
    missing = unseen(expected, out)
    if missing is not None:
        raise PageError(f"not seen: {missing}\n{seen}")


class Reader:
    """Follows pages in ``folder``, with the interpreter that runs the tests. ``prepared`` was
    started with the `environment` of readers. Without it, commands also have ``variables``.
    """

    def __init__(
        self, folder: Path, prepared: PreparedProcess | None = None, **variables: str
    ) -> None:
        self.folder, self._prepared = folder, prepared
        self._where: dict[str, Any] = {"cwd": folder, "env": {**self.environment(), **variables}}
        self._servers: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def environment() -> dict[str, str]:
        """Variables of all commands."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        modules = os.pathsep.join((str(ROOT), str(ROOT / "controllers")))
        return {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": modules,
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }

    def follow(self, text: str) -> None:
        """Follow a page from top to bottom.

        Raises:
            PageError: a command fails, or its output differs from the page.
        """
        with self._running() as running:
            for block in blocks(text):
                if block.name:
                    (self.folder / block.name).write_text(block.text)
                elif block.language == "python":
                    self._run_program(block.text)
                elif block.language == "console":
                    for command in block.commands:
                        if command.in_background:
                            running.append(self._start(command))
                        else:
                            self._run_command(command)

    def _run_program(self, text: str) -> None:
        if self._prepared is None:
            self._run([sys.executable, "-c", text], text, ())
        else:
            done = self._prepared.run(["python", "-c", text], self.folder, timeout=COMMAND_S)
            _judge(text, *done, ())

    def _run_command(self, command: Command) -> None:
        line, words = command.line, command.words
        if self._prepared is None or words is None:
            self._run(["bash", "-c", line], line, command.expected)
            return
        code, out, err = self._prepared.run(
            words, self.folder, timeout=COMMAND_S, merged=" 2>&1" in line
        )
        _judge(line, 0 if line.endswith(" || true") else code, out, err, command.expected)
        if words[1] == "stop":
            self._wait_for_end(words[2])

    def _wait_for_end(self, run: str) -> None:
        """A human types the next command after the run has ended."""
        from tests.e2e.harness import until
        from tianflow.server.common import client

        runs = self.folder / "runs"
        until(f"{run} has ended", lambda: run not in client.running(runs), within_s=COMMAND_S)

    def _run(self, arguments: list[str], label: str, expected: tuple[str, ...]) -> None:
        done = subprocess.run(
            arguments,
            **self._where,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        _judge(label, done.returncode, done.stdout, done.stderr, expected)

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        """Start a run or a server in the background and wait until it trains or listens."""
        from tests.e2e.harness import until
        from tianflow.server.common import client

        before = set(client.running(self.folder / "runs"))
        output = self.folder / "run.log"
        with output.open("ab") as log:
            begin = log.tell()
            line = f"exec {command.line.rstrip('& ')}"
            if command.trains:  # its learner rests most of the time, and so do its actors
                line += " learner.slowdown=10"
            process = subprocess.Popen(
                ["nice", "bash", "-c", line],  # it trains with what the commands beside it leave
                **self._where,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def listens() -> bool:
            found = output.read_bytes()[begin:]
            return b"listening at tcp://" in found or b"serving at http://" in found

        def trains() -> bool:
            new = [
                contact
                for name, contact in client.running(self.folder / "runs").items()
                if command.is_node or name not in before
            ]
            with suppress(TianflowError):  # it does not answer yet
                return any(
                    client.request(contact, "GET")["bottleneck"].endswith(("bound", "balanced"))
                    or command.needs_nodes
                    for contact in new
                )
            return False

        def ready() -> bool:
            if process.poll() is not None:
                raise PageError(
                    f"{command.line} ended with {process.returncode}:\n{output.read_text()[-3000:]}"
                )
            return listens() if command.serves else trains()

        until(f"{command.line} is ready", ready, within_s=COMMAND_S)
        if command.serves:
            self._servers.append(process)
        return process

    @contextmanager
    def _running(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Background processes of the page, which must have stopped all runs by its end."""
        running: list[subprocess.Popen[bytes]] = []
        try:
            yield running
            for process in sorted(running, key=lambda process: process in self._servers):
                expected = 0
                if process in self._servers:
                    process.terminate()
                    expected = 128 + signal.SIGTERM
                if (code := process.wait(COMMAND_S)) != expected:
                    raise PageError(
                        f"exit code {code}: {(self.folder / 'run.log').read_text()[-3000:]}"
                    )
        finally:
            for process in running:
                process.kill()
                process.wait()
