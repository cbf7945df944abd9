"""The pages in ``docs/``, read as a person reads them: files are written, commands run, and what a
page shows is what is seen.

- A fence that begins with ``# NAME.py`` or ``# NAME.toml`` is a file of that name.
- In a ``console`` fence a line that begins with ``$`` is a command; the lines under it must be seen
  in its output, in that order. ``...`` stands for anything. A command that ends in ``&`` goes on
  until the page is over: it is waited for until it trains.
- Every other ``python`` fence is a program, and ``text`` is nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from tests.support.paths import ROOT
from tianflow.errors import TianflowError

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
NAME = re.compile(r"# ([\w.-]+\.(?:py|toml))")
COMMAND_S = 150.0
"""Far more than any command of a page takes, on a machine that has other things to do."""
LANGUAGES = ("console", "python", "toml", "text")


@dataclass(frozen=True)
class Command:
    """One line of a console, and what a reader is told to see."""

    line: str
    expected: tuple[str, ...]

    @property
    def goes_on(self) -> bool:
        return self.line.endswith("&") and not self.line.endswith("&&")


@dataclass(frozen=True)
class Block:
    """One fence: its language, its text, and the line of the page at which it begins."""

    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        """Of the file that it is; "" if it is none."""
        found = NAME.match(self.text)
        return found[1] if found else ""

    @property
    def commands(self) -> list[Command]:
        """Of a console."""
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
    """Rows of all tables of a page, without their heads: the text of each cell."""
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
    """The first of the ``expected`` lines that is not in ``output`` after those before it; None if
    all are.
    """
    lines = iter(output.splitlines())
    for wanted in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in wanted.split("...")))
        if not any(pattern.fullmatch(line.strip()) for line in lines):
            return wanted
    return None


class PageError(AssertionError):
    """Somebody who follows the page would be stuck here."""


class Reader:
    """Follows pages in ``folder``, with the interpreter that runs the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        modules = os.pathsep.join((str(ROOT), str(ROOT / "controllers")))
        environment = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": modules,
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }
        self._where: dict[str, Any] = {"cwd": folder, "env": environment}

    def follow(self, text: str) -> None:
        """Do all that a page says, from top to bottom.

        Raises:
            PageError: a command fails, or does not say what the page shows.
        """
        with self._running() as running:
            for block in blocks(text):
                if block.name:
                    (self.folder / block.name).write_text(block.text)
                elif block.language == "python":
                    self._run([sys.executable, "-c", block.text], block.text, ())
                elif block.language == "console":
                    for command in block.commands:
                        if command.goes_on:
                            running.append(self._start(command))
                        else:
                            self._run(["bash", "-c", command.line], command.line, command.expected)

    def _run(self, arguments: list[str], told: str, expected: tuple[str, ...]) -> None:
        done = subprocess.run(
            arguments,
            **self._where,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        seen = f"{told}\n--- stdout\n{done.stdout[-3000:]}\n--- stderr\n{done.stderr[-3000:]}"
        if done.returncode:
            raise PageError(f"exit code {done.returncode}: {seen}")
        missing = unseen(expected, done.stdout)
        if missing is not None:
            raise PageError(f"not seen: {missing}\n{seen}")

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        """Start a run, and wait until it has something to tell: a person would read on
        meanwhile.
        """
        from tests.e2e.harness import until
        from tianflow.cli import client

        before = set(client.running(self.folder / "runs"))
        with (self.folder / "run.log").open("ab") as log:
            line = f"exec {command.line.rstrip('& ')}"
            process = subprocess.Popen(
                ["bash", "-c", line],
                **self._where,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def trains() -> bool:
            if process.poll() is not None:
                raise PageError(
                    f"{command.line} ended with "
                    f"{process.returncode}:\n{(self.folder / 'run.log').read_text()[-3000:]}"
                )
            new = [
                contact
                for name, contact in client.running(self.folder / "runs").items()
                if name not in before
            ]
            with suppress(TianflowError):  # it does not answer yet
                return any(
                    client.request(contact, "GET")["bottleneck"].endswith(("bound", "balanced"))
                    for contact in new
                )
            return False

        until(f"{command.line} trains", trains, within_s=COMMAND_S)
        return process

    @contextmanager
    def _running(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Processes that the page started and did not wait for; by its end it has told each of them
        to end.
        """
        running: list[subprocess.Popen[bytes]] = []
        try:
            yield running
            for process in running:
                if code := process.wait(COMMAND_S):
                    raise PageError(
                        f"exit code {code}: {(self.folder / 'run.log').read_text()[-3000:]}"
                    )
        finally:
            for process in running:
                process.kill()
                process.wait()
