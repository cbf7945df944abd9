"""``tianflow train``: one run in this process, with a live screen, signals and an exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tianflow.api import Prepared, Session, opened, prepare
from tianflow.cli.screen import LastingConsole, make_screen, summary_text
from tianflow.config.model import Config
from tianflow.errors import ConfigError, Problem, RunError
from tianflow.hosts import event_loop as loops
from tianflow.logs import configure
from tianflow.rundir.summary import EOF, lost

STDIN = 0


def run(
    config: Config,
    *,
    resume: str | None,
    runs_dir: Path,
    http: bool,
    plain: bool,
    json_line: bool,
    require_target: bool,
    until_eof: bool = False,
) -> int:
    """``tianflow train``: everything a person sees, and the exit code."""
    console = LastingConsole(stderr=json_line)  # the result line has standard output to itself
    configure(level="ERROR" if console.is_terminal and not plain else "WARNING")
    # Not inside the loop: there an interrupt would have to wait for an environment that does not
    # come back.
    prepared = prepare(config, resume, runs_dir)
    signals = _Signals(lambda text: console.print(text, highlight=False), until_eof=until_eof)
    summary: dict[str, Any] = {}
    failure: RunError | None = None
    try:
        loops.run(_shown(prepared, signals, console, summary, http=http, plain=plain))
    except RunError as error:
        failure = error
        summary |= {"state": "failed", "error": str(error)} if summary else {}
    except asyncio.CancelledError:
        console.print("interrupted before anything was started", highlight=False)
    if summary:
        told = (
            json.dumps(summary)
            if json_line
            else summary_text(summary) + _what_next(prepared.directory, summary)
        )
        sys.stdout.write(f"{told}\n")
    sys.stdout.flush()
    if failure is not None:
        _show_failure(failure)
        return 1
    if signals.caught:
        return 128 + signals.caught[0]
    return 1 if lost(summary) or (require_target and not summary.get("target_reached")) else 0


def _what_next(directory: Path, summary: Mapping[str, Any]) -> str:
    """Where the policy lies, and what can be done with it; nothing where there is none."""
    return (
        ""
        if summary.get("checkpoint") is None
        else f"\n  kept in {directory}: tianflow eval {directory}, tianflow report {directory}"
    )


async def _shown(
    prepared: Prepared,
    signals: _Signals,
    console: Console,
    summary: dict[str, Any],
    *,
    http: bool,
    plain: bool,
) -> None:
    """The run with a screen beside it, until it has ended; what came out is in ``summary`` then,
    also where it failed.
    """
    with signals:
        async with opened(prepared, http=http) as session:
            signals.session = session
            if session.address:
                console.print(
                    _where(session, terminal=console.is_terminal), highlight=False, soft_wrap=True
                )
            screen = asyncio.create_task(
                make_screen(run=session.run.control, console=console, plain=plain).run(lambda: None)
            )
            try:
                await asyncio.wait({session.finished})
            finally:
                screen.cancel()
                await asyncio.gather(screen, return_exceptions=True)
            summary.update(session.run.snapshot.summary())


def _show_failure(error: RunError) -> None:
    """The first error, last."""
    if error.details:
        sys.stderr.write(error.details.rstrip() + "\n")
    sys.stderr.write(f"tianflow: {error.component}: {error.summary}\n")


def _where(session: Session, *, terminal: bool) -> str:
    """Where the run answers. On a terminal the address opens the console, token and all; a log,
    which others may read, gets no token.
    """
    if not terminal:
        return f"run {session.run.id}, control and metrics at {session.address}"
    return f"run {session.run.id}, console at {session.address}/#token={session.token}"


class _Signals:
    """One SIGINT, SIGTERM or SIGHUP ends a run cleanly, with a checkpoint; a second one at once.
    Before there is a run, one is enough.

    A terminal that closes may hang up twice, so that is no second one. Where hangups are ignored,
    as under nohup, they stay so.

    Args:
        say: shows a line to whoever pressed Ctrl-C.
        until_eof: the end of standard input counts as one, too.
    """

    def __init__(self, say: Callable[[str], None], *, until_eof: bool) -> None:
        self._say, self._until_eof = say, until_eof
        self.caught: list[int] = []
        self.session: Session | None = None

    def __enter__(self) -> None:
        loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        self._watched = (signal.SIGINT, signal.SIGTERM, *hangup)
        for number in self._watched:
            loop.add_signal_handler(number, self._handle, number, signal.Signals(number).name)
        if self._until_eof:
            try:
                loop.add_reader(STDIN, self._read)
            except PermissionError:
                message = "standard input is a file, whose end says nothing of whoever started this"
                raise ConfigError(
                    [Problem("--until-eof", None, message, "a pipe, a socket or a terminal")]
                ) from None

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._watched:
            loop.remove_signal_handler(number)
        if self._until_eof:
            loop.remove_reader(STDIN)

    def _read(self) -> None:
        """Whoever started this holds the other end of standard input, and writes nothing: an end
        says that they are gone.
        """
        if not os.read(STDIN, 4096):
            asyncio.get_running_loop().remove_reader(STDIN)
            self._handle(signal.SIGHUP, EOF)

    def _handle(self, number: int, reason: str) -> None:
        if self.caught and reason == signal.SIGHUP.name:
            return
        self.caught.append(number)
        if self.session is None:
            assert self._main is not None
            self._main.cancel()
        elif len(self.caught) == 1:
            self.session.run.lifecycle.end("stopped", reason)
            self._say(
                f"{reason}: stopping with a last checkpoint; once more stops at once"
            )  # fails where the terminal is gone
        else:
            self.session.finished.cancel()
