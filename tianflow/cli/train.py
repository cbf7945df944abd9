"""``tianflow train``: one run in this process, with a screen, signals and an exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tianflow.api import Prepared, Session, opened, prepare
from tianflow.cli.screen import LastingConsole, make_screen, summary_text
from tianflow.config.imports import require_trusted
from tianflow.config.model import Config
from tianflow.errors import ConfigError, Problem, RunError, printable
from tianflow.hosts import event_loop as loops
from tianflow.logs import configure, logger, report_death
from tianflow.rundir.summary import EOF, lost

log = logger("screen")

STDIN = 0
EPISODES_TO_COMPARE = 10
"""Episodes of training and of evaluation from which their returns are compared."""


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
    """Train, and return the exit code."""
    console = LastingConsole(stderr=json_line)  # the result line has standard output to itself
    configure(level="ERROR" if console.is_terminal and not plain else "WARNING")
    # Outside the event loop: inside, an interrupt would wait for an environment that hangs.
    prepared = prepare(
        config,
        resume,
        runs_dir,
        report=lambda text: console.print(
            printable(text), highlight=False, markup=False, soft_wrap=True
        ),
    )
    signals = _Signals(lambda text: console.print(text, highlight=False), until_eof=until_eof)
    summary: dict[str, Any] = {}
    failure: RunError | None = None
    try:
        loops.run(_run_with_screen(prepared, signals, console, summary, http=http, plain=plain))
    except RunError as error:
        failure = error
        summary |= {"state": "failed", "error": str(error)} if summary else {}
    except asyncio.CancelledError:
        console.print("interrupted before the run started", highlight=False)
    if summary:
        text = (
            json.dumps(summary)
            if json_line
            else printable(
                summary_text(summary) + _next_steps(prepared.directory, summary, prepared.config)
            )
        )
        sys.stdout.write(f"{text}\n")
        if json_line and (unsaved := lost(summary)):
            console.print(f"tianflow: {unsaved}", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    if failure is not None:
        _show_failure(failure)
        return 1
    return _exit_code(summary, signals.caught, require_target=require_target)


def _exit_code(summary: Mapping[str, Any], caught: Sequence[int], *, require_target: bool) -> int:
    """The exit code of a run that did not fail.

    Lost updates outrank one signal: that run was asked for a last checkpoint and has none. A second
    signal asks for an end without one.
    """
    if lost(summary) and len(caught) < 2:
        return 1
    if caught:
        return 128 + caught[0]
    return 1 if require_target and not summary.get("target_reached") else 0


def _next_steps(directory: Path, summary: Mapping[str, Any], config: Config) -> str:
    """Directory of the policy, and commands that use it; "" without a checkpoint."""
    if summary.get("checkpoint") is None:
        return ""
    trust = " --trust" if _needs_trust(config) else ""
    return (
        f"\n  saved in {directory}: tianflow eval {directory}{trust}, tianflow report {directory}"
    )


def _needs_trust(config: Config) -> bool:
    """True if an evaluation imports a module that the checkpoint names."""
    tables = config.model_dump(mode="json", include={"algorithm", "env", "network"})
    try:
        require_trusted(tables, trust=False)
    except ConfigError:
        return True
    return False


async def _run_with_screen(
    prepared: Prepared,
    signals: _Signals,
    console: Console,
    summary: dict[str, Any],
    *,
    http: bool,
    plain: bool,
) -> None:
    """Run with a screen until the end. ``summary`` receives the result, also after a failure."""
    with signals:
        async with opened(prepared, http=http) as session:
            signals.session = session
            if session.address:
                console.print(
                    _address_line(session, terminal=console.is_terminal),
                    highlight=False,
                    soft_wrap=True,
                )
            screen = asyncio.create_task(
                make_screen(run=session.run.control, console=console, plain=plain).run(lambda: None)
            )
            report_death(screen, log, "the screen shows nothing more; the run continues")
            try:
                await asyncio.wait({session.finished})
            finally:
                screen.cancel()
                await asyncio.gather(screen, return_exceptions=True)
            summary.update(session.run.snapshot.summary())
            returns = session.run.snapshot.statistics().recent_returns
            if prepared.config.evaluation.deterministic and (
                sentence := disagreement(summary.get("evaluation") or {}, returns)
            ):
                console.print(f"note: {sentence}", highlight=False, soft_wrap=True)


def disagreement(evaluation: Mapping[str, float], returns: Sequence[float]) -> str | None:
    """A sentence for a policy whose most probable actions are far worse than its sampled ones; None
    otherwise.

    Far worse: by more than half of the training return, and by more than one standard deviation of
    training episodes. Actions of exploration make a training return worse, not better.

    Args:
        evaluation: ``mean_return`` and ``episodes`` of the last evaluation, of the most probable
            actions.
        returns: of the last training episodes.
    """
    if min(len(returns), evaluation.get("episodes", 0)) < EPISODES_TO_COMPARE:
        return None
    trained, evaluated = statistics.fmean(returns), evaluation["mean_return"]
    if trained - evaluated <= max(abs(trained) / 2, statistics.pstdev(returns)):
        return None
    return (
        f"the most probable actions have a mean return of {evaluated:.4g}, training had "
        f"{trained:.4g}: the policy needs its random actions; train longer, or evaluate it as it "
        "trains, with evaluation.deterministic = false"
    )


def _show_failure(error: RunError) -> None:
    """Print the first error, as the last output."""
    if error.details:
        sys.stderr.write(printable(error.details.rstrip()) + "\n")
    sys.stderr.write(printable(f"tianflow: {error.component}: {error.summary}") + "\n")


def _address_line(session: Session, *, terminal: bool) -> str:
    """Address of the run. On a terminal it opens the console with the token. A log may be read by
    others, so it gets no token.
    """
    if not terminal:
        return f"run {session.run.id}, control and metrics at {session.address}"
    return f"run {session.run.id}, console at {session.address}/#token={session.token}"


class _Signals:
    """Ends a run cleanly, with a checkpoint, on the first SIGINT, SIGTERM or SIGHUP; at once on the
    second. Before the run has started, the first ends it at once.

    A terminal that closes may send SIGHUP twice, so a second SIGHUP does not count. If SIGHUP is
    ignored, as under nohup, it stays ignored.

    Args:
        write: shows a line to the user.
        until_eof: the end of standard input counts as a signal, too.
    """

    def __init__(self, write: Callable[[str], None], *, until_eof: bool) -> None:
        self._write, self._until_eof = write, until_eof
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
                message = "standard input is a file, and its end is not a signal"
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
        """Read standard input. The process that started this one holds the other end and writes
        nothing, so an end of file means that it has exited.
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
            self._write(
                f"{reason}: stopping with a last checkpoint; a second signal stops at once"
            )  # fails if the terminal was closed
        else:
            self.session.finished.cancel()
