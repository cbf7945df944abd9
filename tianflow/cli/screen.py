"""Views of a run in a terminal: the live screen, plain lines at an interval, and the summary."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tianflow.core.events import EvaluationFinished
from tianflow.core.formatting import DASH, duration, number, sparkline, steady_speed
from tianflow.errors import printable
from tianflow.interfaces import RunControl
from tianflow.observability.learning import loss_in
from tianflow.observability.rates import RunRates
from tianflow.observability.run_document import (
    ENDED,
    LearningState,
    ReplayState,
    RunDocument,
    Speeds,
    StalenessAgainstBound,
    describe,
)
from tianflow.rundir.summary import REQUESTED, lost

if TYPE_CHECKING:
    from tianflow.channels.broadcast import Subscription

BAR = 24
SHOWN = (
    "train/policy_loss",
    "train/value_loss",
    "train/entropy",
    "train/approx_kl",
    "train/q_value",
    "train/temperature",
    "train/explained_variance",
    "train/grad_norm",
    "rollout/exploration_rate",
)
"""Statistics beside the loss, if the algorithm has them."""
SIDES = {"insert": "actors", "draw": "learner"}
"""Components that replay blocks, by the side of its limiter."""
RECENT_EPISODES = 100
"""Number of episodes of the mean return in a summary."""
NOTICEABLE = 0.005
"""A smaller share would read as 0%."""
STYLES = {"busy": "green", "waiting": "yellow", "paused": "blue"}


class LastingConsole(Console):
    """Console that survives a broken pipe: it discards further output. (rich would end the
    program.)
    """

    def on_broken_pipe(self) -> None:
        """Send the stream to the null device, so its buffer can be flushed without an error."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


class Screen:
    """Redraws the run ``1 / interval_s`` times a second, in place.

    Consumes: statistics. Produces: text on ``console``. Waits: for its interval. Unblocked by:
    time.
    """

    def __init__(self, *, run: RunControl, console: Console, interval_s: float = 0.5) -> None:
        self._run, self._console, self._interval_s = run, console, interval_s
        self._rates = RunRates(read=run.statistics)

    async def run(self, started: Callable[[], None]) -> None:
        """Draw until cancelled; the last drawing remains."""
        with Live(console=self._console, auto_refresh=False) as live:
            started()
            try:
                while True:
                    live.update(self.draw(), refresh=True)
                    await asyncio.sleep(self._interval_s)
            finally:
                live.update(self.draw(), refresh=True)

    def draw(self) -> Group:
        """The current screen."""
        return drawing(describe(self._rates.sample(), self._run.config, self._rates))


class PlainLines:
    """Writes one line about the run every ``interval_s`` seconds, and one at the end. Before it
    stands a line for each evaluation since the last one.

    Consumes: statistics, evaluations. Produces: lines for ``write``. Waits: for its interval.
    Unblocked by: time.
    """

    def __init__(
        self, *, run: RunControl, write: Callable[[str], None], interval_s: float = 5.0
    ) -> None:
        self._run, self._write, self._interval_s = run, write, interval_s
        self._rates = RunRates(read=run.statistics)

    async def run(self, started: Callable[[], None]) -> None:
        """Write until cancelled."""
        evaluations = self._run.events.subscribe(kind=EvaluationFinished)
        self._rates.sample()
        started()
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                self._write_lines(evaluations)
        finally:
            self._write_lines(evaluations)
            self._run.events.unsubscribe(evaluations)

    def _write_lines(self, evaluations: Subscription) -> None:
        while isinstance(event := evaluations.receive_nowait(), EvaluationFinished):
            self._write_line(f"evaluation {event.name}: {_evaluation(asdict(event))}")
        self._write_line(self.line())

    def _write_line(self, line: str) -> None:
        with suppress(OSError):  # a disk that is full may have room for the next line
            self._write(line)

    def line(self) -> str:
        """The current line."""
        return plain_line(describe(self._rates.sample(), self._run.config, self._rates))


def make_screen(*, run: RunControl, console: Console, plain: bool) -> Screen | PlainLines:
    """The live screen if ``console`` is a terminal and ``plain`` is False; else plain lines."""
    if plain or not console.is_terminal:
        return PlainLines(
            run=run,
            write=lambda line: console.print(
                printable(line), markup=False, highlight=False, soft_wrap=True
            ),
        )
    return Screen(run=run, console=console)


# From the run document to text
# --------------------------------------------------------------------------------------------------


def plain_line(run: RunDocument) -> str:
    """One line: no colours, no control characters."""
    progress, returns, staleness = run.progress, run.returns, run.staleness
    speeds = run.throughput
    speed = steady_speed(speeds.env_steps_per_s, speeds.updates_per_s)
    parts = [
        duration(run.elapsed_s),
        run.state,
        f"steps {progress.env_steps:,} ({number(speed)}/s)",
        f"updates {progress.updates:,}",
        f"return {number(returns.mean)} over {returns.episodes} episodes",
        *_loss_part(run.learning),
        (
            f"staleness mean {number(staleness.mean)} max {number(staleness.max)} bound now "
            f"{staleness.bound}"
        ),
        f"dropped {sum(run.trajectories.dropped.values()):,}",
        *([] if run.replay is None else [f"replay {_replay(run, run.replay)}"]),
        run.bottleneck,
        *(["an evaluation runs"] if run.evaluating else []),
    ]
    left = (
        f"{name} is reached in {duration(seconds)}"
        for name, seconds in progress.time_left_s.items()
    )
    return "  ".join([*parts, *left])


def drawing(run: RunDocument) -> Group:
    """The live screen: title, numbers, shares of time."""
    title = Text.assemble(
        (run.id, "bold"),
        f"  {run.environment} {run.algorithm}  ",
        (run.state, "bold cyan"),
        f"  {duration(run.elapsed_s)}",
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(run):
        shown = printable(text.plain)
        table.add_row(name, text if shown == text.plain else Text(shown))
    return Group(title, table)


def _rows(run: RunDocument) -> list[tuple[str, Text]]:
    speeds, progress = run.throughput, run.progress
    left = "   ".join(
        f"{name} {duration(seconds)}" for name, seconds in progress.time_left_s.items()
    )
    rows = [
        ("return", Text(_curve(run.learning, "return") + _return(run))),
        *([("evaluations", Text(text))] if (text := _evaluations(run)) else []),
        *([("loss", Text(_learning(run.learning)))] if run.learning.values else []),
        (
            "steps/s",
            Text(f"{_speeds(speeds.env_steps_per_s)}   {progress.env_steps:,} steps"),
        ),
        (
            "updates/s",
            Text(f"{_speeds(speeds.updates_per_s)}   {progress.updates:,} updates"),
        ),
        ("staleness", _staleness(run.staleness)),
        *([] if run.replay is None else [("replay", Text(_replay(run, run.replay)))]),
        ("credits", Text(_credits(run))),
        *(
            ("shards" if role == "replay" else role, _shares(shares))
            for role, shares in run.shares.items()
        ),
        ("bottleneck", Text.assemble((run.bottleneck, "bold"), f"  {run.diagnosis.advice}")),
        ("time left", Text(left or DASH)),
    ]
    if run.reasons:
        rows.append(("not ready", Text("; ".join(run.reasons), style="yellow")))
    return rows


def _return(run: RunDocument) -> str:
    returns, target = run.returns, run.target
    text = (
        f"{number(returns.mean)} mean  {number(returns.min)} to {number(returns.max)} "
        f"over {returns.episodes} episodes"
    )
    if target.return_ is not None:
        reached = (
            ""
            if target.reached_after_s is None
            else f", reached after {duration(target.reached_after_s)}"
        )
        text += f"   target {number(target.return_)}{reached}"
    if run.evaluation:
        text += (
            f"   evaluated {number(run.evaluation.get('mean_return'))} at version "
            f"{number(run.evaluation.get('version'))}"
        )
    return text


def _evaluations(run: RunDocument) -> str:
    """The best version and further evaluations; "" without both."""
    best = run.checkpoint.best
    parts = [
        f"{name} {number(found.get('mean_return'))} at version {number(found.get('version'))}"
        for name, found in run.further_evaluations.items()
    ]
    if best is not None:
        parts.insert(0, f"best {number(best.mean_return)} at version {number(best.version)}")
    return "   ".join(parts)


def _curve(learning: LearningState, name: Literal["return", "loss"]) -> str:
    """The curve and a space; "" without one."""
    line = sparkline(learning.curves.get(name, ()))
    return f"{line}  " if line else ""


def _loss_part(learning: LearningState) -> list[str]:
    name = loss_in(learning.values)
    return [] if name is None else [f"loss {number(learning.values[name])}"]


def _learning(learning: LearningState) -> str:
    """Curve and value of the loss, and the other statistics of updates."""
    loss, values = loss_in(learning.values), learning.values
    shown = [name for name in SHOWN if name in values and name != loss]
    first = [] if loss is None else [number(values[loss])]
    others = [f"{name.partition('/')[2]} {number(values[name])}" for name in shown]
    return _curve(learning, "loss") + "  ".join([*first, *others])


def _speeds(speeds: Speeds) -> str:
    return "  ".join(f"{number(speed)} ({window} s)" for window, speed in speeds.items())


def _staleness(staleness: StalenessAgainstBound) -> Text:
    values = {
        "min": staleness.min,
        "mean": staleness.mean,
        "p99": staleness.p99,
        "max": staleness.max,
    }
    figures = "  ".join(f"{number(value)} {name}" for name, value in values.items())
    text = Text(f"{figures}   bound {staleness.bound}")
    violated = staleness.violations
    return text.append(f"   {violated} violations", style="bold red") if violated else text


def _credits(run: RunDocument) -> str:
    return (
        f"{run.credits.in_use} of {run.credits.limit} in use   queue {run.queue.trajectories}   "
        f"dropped {sum(run.trajectories.dropped.values()):,}"
    )


def _replay(run: RunDocument, replay: ReplayState) -> str:
    """Items, ratio of draws to inserts, and the side that was blocked lately; of a run that has
    ended only the ratio.
    """
    ratio = _ratio(replay.samples_per_insert, replay.samples_per_insert_target)
    if run.state in ENDED:
        return ratio
    items = f"{replay.items:,} of {replay.capacity:,} items"
    if not replay.shards:
        items = "shards start" if run.state == "starting" else "shards do not work"
    if replay.shards and replay.items < replay.min_size:
        items += f" (draws begin at {replay.min_size:,})"
    blocked = [
        f"{SIDES[side]} blocked {share:.0%}"
        for side, share in replay.held_back.items()
        if share >= NOTICEABLE
    ]
    return f"{items}  {ratio}  {', '.join(blocked) or 'nothing blocked'}"


def _ratio(samples_per_insert: float | None, target: float | None) -> str:
    return f"{number(samples_per_insert)} samples per insert" + (
        "" if target is None else f" of {number(target)}"
    )


def _shares(shares: Mapping[str, float]) -> Text:
    text, largest = Text(), sorted(shares.items(), key=lambda item: -item[1])
    for state, share in largest:
        text.append("█" * round(share * BAR), style=STYLES.get(state.partition(":")[0], "dim"))
    return text.append("  " + "  ".join(f"{state} {share:.0%}" for state, share in largest))


def summary_text(summary: Mapping[str, Any]) -> str:
    """A finished run in a few lines, from ``summary.json``. Missing values are omitted."""
    lines = [f"{summary.get('run', 'run')}: {_end(summary)}", *_verdict(summary)]
    if "env_steps" in summary:
        lines.append(
            f"  {_steps(summary)} in {duration(summary.get('training_s'))} "
            f"({number(summary.get('steps_per_s'))}/s), "
            f"{summary.get('updates', 0):,} updates, {summary.get('episodes', 0):,} episodes, "
            f"mean return {number(summary.get('mean_return'))} over the last {_recent(summary)}"
        )
    if staleness := summary.get("staleness"):
        figures = ", ".join(
            f"{key} {number(staleness[key])}"
            for key in ("min", "mean", "p99", "max")
            if key in staleness
        )
        lines.append(
            f"  staleness {figures}; bound {staleness.get('bound')} at the end, "
            f"{staleness.get('violations', 0)} violations"
        )
    if trajectories := summary.get("trajectories"):
        reasons = (
            ", ".join(f"{reason} {count:,}" for reason, count in trajectories["dropped"].items())
            or "none"
        )
        fate = "inserted" if summary.get("replay") else "trained"
        lines.append(
            f"  trajectories: {trajectories['begun']:,} begun, {trajectories[fate]:,} {fate}, "
            f"dropped: {reasons}"
        )
    if replay := summary.get("replay"):
        ratio = _ratio(replay["samples_per_insert"], replay["samples_per_insert_target"])
        blocked = ", ".join(
            f"{SIDES[side]} {duration(seconds)}" for side, seconds in replay["blocked_s"].items()
        )
        lines.append(
            f"  replay: {replay['inserted']:,} items inserted, {replay['drawn']:,} drawn, "
            f"{ratio}, blocked: {blocked}"
        )
    if unsaved := lost(summary):
        lines.append(f"  {unsaved}")
    if error := summary.get("error"):
        lines.append(f"  error: {error}")
    return "\n".join(lines)


def _end(summary: Mapping[str, Any]) -> str:
    """The state, and its reason in brackets. `REQUESTED` says both."""
    state, reason = summary.get("state", "ended"), summary.get("reason")
    if reason == REQUESTED:
        return REQUESTED
    return f"{state} ({reason})" if reason else str(state)


def _steps(summary: Mapping[str, Any]) -> str:
    """Steps of the run; of a resumed run also those since then, to which its seconds belong."""
    steps, pace, seconds = (
        summary["env_steps"],
        summary.get("steps_per_s"),
        summary.get("training_s"),
    )
    since = round(pace * seconds) if pace and seconds else steps
    return (
        f"{steps:,} steps"
        if since >= steps - 1
        else f"{steps:,} steps, {since:,} of them since the resume"
    )


def _recent(summary: Mapping[str, Any]) -> str:
    """The episodes of the mean return. A summary of an older version does not have their number."""
    count = summary.get("recent_episodes")
    return f"episodes (at most {RECENT_EPISODES})" if count is None else f"{count} episodes"


def _evaluation(found: Mapping[str, Any]) -> str:
    return (
        f"mean return {number(found.get('mean_return'))} over {number(found.get('episodes'))} "
        f"episodes, version {number(found.get('version'))}"
    )


def _verdict(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    if evaluation := summary.get("evaluation"):
        lines.append(f"  evaluation: {_evaluation(evaluation)}")
    for name, evaluation in (summary.get("further_evaluations") or {}).items():
        lines.append(f"  evaluation {name}: {_evaluation(evaluation)}")
    if best := summary.get("best"):
        lines.append(f"  best: {_evaluation(best)}")
    target = summary.get("target_return")
    if target is not None:
        after = summary.get("time_to_target_s")
        verdict = (
            "not reached"
            if not summary.get("target_reached")
            else "reached" + ("" if after is None else f" after {duration(after)}")
        )
        lines.append(f"  target {number(target)}: {verdict}")
    return lines
