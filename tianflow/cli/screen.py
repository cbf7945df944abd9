"""What a person sees while a run goes on: a live screen on a terminal, else one plain line at an
interval.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tianflow.core.formatting import DASH, duration, number
from tianflow.interfaces import RunControl
from tianflow.observability.rates import RunRates
from tianflow.observability.run_document import ENDED, describe
from tianflow.rundir.summary import lost

BAR = 24
WHO = {"insert": "actors", "draw": "learner"}
"""Whom replay holds back, by the side."""
NOTICEABLE = 0.005
"""A share below this would read as 0%."""
STYLES = {"busy": "green", "waiting": "yellow", "paused": "blue"}


class LastingConsole(Console):
    """One whose reader may leave: what would be written goes nowhere from then on. (rich ends the
    program there.)
    """

    def on_broken_pipe(self) -> None:
        """The stream leads nowhere from now on, so what it still holds does no harm either."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


class Screen:
    """Draws the run anew ``1 / interval_s`` times a second, in place.

    Consumes: statistics. Produces: text on ``console``. Waits: for its interval. Unblocked by:
    time.
    """

    def __init__(self, *, run: RunControl, console: Console, interval_s: float = 0.5) -> None:
        self._run, self._console, self._interval_s = run, console, interval_s
        self._rates = RunRates(read=run.statistics)

    async def run(self, started: Callable[[], None]) -> None:
        """Draw until cancelled; the last drawing stays."""
        with Live(console=self._console, auto_refresh=False) as live:
            started()
            try:
                while True:
                    live.update(self.draw(), refresh=True)
                    await asyncio.sleep(self._interval_s)
            finally:
                live.update(self.draw(), refresh=True)

    def draw(self) -> Group:
        """The run as it is now."""
        return drawing(describe(self._rates.sample(), self._run.config, self._rates))


class PlainLines:
    """Writes one line about the run every ``interval_s`` seconds, and one at the end.

    Consumes: statistics. Produces: lines for ``write``. Waits: for its interval. Unblocked by:
    time.
    """

    def __init__(
        self, *, run: RunControl, write: Callable[[str], None], interval_s: float = 5.0
    ) -> None:
        self._run, self._write, self._interval_s = run, write, interval_s
        self._rates = RunRates(read=run.statistics)

    async def run(self, started: Callable[[], None]) -> None:
        """Write until cancelled."""
        self._rates.sample()
        started()
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                self._tell()
        finally:
            self._tell()

    def _tell(self) -> None:
        with suppress(OSError):  # a disk that is full may have room for the next line
            self._write(self.line())

    def line(self) -> str:
        """The run as it is now."""
        return plain_line(describe(self._rates.sample(), self._run.config, self._rates))


def make_screen(*, run: RunControl, console: Console, plain: bool) -> Screen | PlainLines:
    """The live screen where ``console`` is a terminal and nobody wants ``plain`` lines."""
    if plain or not console.is_terminal:
        return PlainLines(
            run=run,
            write=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
    return Screen(run=run, console=console)


# From the description of a run to text
# --------------------------------------------------------------------------------


def plain_line(run: Mapping[str, Any]) -> str:
    """One line: no colours, no control characters."""
    progress, returns, staleness = run["progress"], run["returns"], run["staleness"]
    parts = [
        duration(run["elapsed_s"]),
        run["state"],
        f"steps {progress['env_steps']:,} ({number(run['throughput']['env_steps_per_s']['10'])}/s)",
        f"updates {progress['updates']:,}",
        f"return {number(returns['mean'])} over {returns['episodes']} episodes",
        (
            f"staleness mean {number(staleness['mean'])} max {number(staleness['max'])} bound "
            f"{staleness['bound']}"
        ),
        f"dropped {sum(run['trajectories']['dropped'].values()):,}",
        *([] if run["replay"] is None else [f"replay {_replay(run)}"]),
        run["bottleneck"],
        *(["evaluating"] if run["evaluating"] else []),
    ]
    return "  ".join(
        [*parts, *(f"{name} in {duration(left)}" for name, left in progress["time_left_s"].items())]
    )


def drawing(run: Mapping[str, Any]) -> Group:
    """The live screen: title, numbers, shares of time."""
    title = Text.assemble(
        (run["id"], "bold"),
        f"  {run['environment']} {run['algorithm']}  ",
        (run["state"], "bold cyan"),
        f"  {duration(run['elapsed_s'])}",
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(run):
        table.add_row(name, text)
    return Group(title, table)


def _rows(run: Mapping[str, Any]) -> list[tuple[str, Text]]:
    left = run["progress"]["time_left_s"]
    rows = [
        ("return", Text(_return(run))),
        (
            "steps/s",
            Text(
                _speeds(run["throughput"]["env_steps_per_s"])
                + f"   {run['progress']['env_steps']:,} steps"
            ),
        ),
        (
            "updates/s",
            Text(
                _speeds(run["throughput"]["updates_per_s"])
                + f"   {run['progress']['updates']:,} updates"
            ),
        ),
        ("staleness", _staleness(run["staleness"])),
        *([] if run["replay"] is None else [("replay", Text(_replay(run)))]),
        ("credits", Text(_credits(run))),
        *(
            ("shards" if role == "replay" else role, _shares(shares))
            for role, shares in run["shares"].items()
        ),
        (
            "bottleneck",
            Text.assemble((run["bottleneck"], "bold"), f"  {run['diagnosis']['advice']}"),
        ),
        (
            "time left",
            Text(
                "   ".join(f"{name} {duration(seconds)}" for name, seconds in left.items()) or DASH
            ),
        ),
    ]
    if run["reasons"]:
        rows.append(("not ready", Text("; ".join(run["reasons"]), style="yellow")))
    return rows


def _return(run: Mapping[str, Any]) -> str:
    returns, target, evaluation = run["returns"], run["target"], run["evaluation"]
    text = (
        f"{number(returns['mean'])} mean  {number(returns['min'])} to "
        f"{number(returns['max'])} "
        f"over {returns['episodes']} episodes"
    )
    if target["return"] is not None:
        reached = (
            ""
            if target["reached_after_s"] is None
            else f", reached after {duration(target['reached_after_s'])}"
        )
        text += f"   target {number(target['return'])}{reached}"
    if evaluation:
        text += (
            f"   evaluated {number(evaluation.get('mean_return'))} at version "
            f"{number(evaluation.get('version'))}"
        )
    return text


def _speeds(speeds: Mapping[str, float | None]) -> str:
    return "  ".join(f"{number(speed)} ({window} s)" for window, speed in speeds.items())


def _staleness(staleness: Mapping[str, Any]) -> Text:
    figures = "  ".join(f"{number(staleness[key])} {key}" for key in ("min", "mean", "p99", "max"))
    violated = staleness["violations"]
    text = Text(f"{figures}   bound {staleness['bound']}")
    return text.append(f"   {violated} violations", style="bold red") if violated else text


def _credits(run: Mapping[str, Any]) -> str:
    credits_, queue, dropped = (
        run["credits"],
        run["queue"],
        sum(run["trajectories"]["dropped"].values()),
    )
    return (
        f"{credits_['in_use']} of {credits_['limit']} in use   queue {queue['trajectories']}   "
        f"dropped {dropped:,}"
    )


def _replay(run: Mapping[str, Any]) -> str:
    """Items, their ratio against the one to keep to, and who was held back lately; of a run that
    has ended the ratio is left.
    """
    replay = run["replay"]
    if run["state"] in ENDED:
        return _ratio(replay)
    items = (
        f"{replay['items']:,} of {replay['capacity']:,} items"
        if replay["shards"]
        else "no shard is up"
    )
    if replay["shards"] and replay["items"] < replay["min_size"]:
        items += f" (drawing begins at {replay['min_size']:,})"
    held = [
        f"{WHO[side]} held back {share:.0%}"
        for side, share in replay["held_back"].items()
        if share >= NOTICEABLE
    ]
    return f"{items}  {_ratio(replay)}  {', '.join(held) or 'nobody held back'}"


def _ratio(replay: Mapping[str, Any]) -> str:
    target = replay["samples_per_insert_target"]
    return f"{number(replay['samples_per_insert'])} samples per insert" + (
        "" if target is None else f" of {number(target)}"
    )


def _shares(shares: Mapping[str, float]) -> Text:
    text, largest = Text(), sorted(shares.items(), key=lambda item: -item[1])
    for state, share in largest:
        text.append("█" * round(share * BAR), style=STYLES.get(state.partition(":")[0], "dim"))
    return text.append("  " + "  ".join(f"{state} {share:.0%}" for state, share in largest))


def summary_text(summary: Mapping[str, Any]) -> str:
    """A finished run in a few lines, from what ``summary.json`` holds; what it does not hold is
    left out.
    """
    lines = [
        f"{summary.get('run', 'run')}: {summary.get('state', 'ended')}"
        + (f" ({reason})" if (reason := summary.get("reason")) else "")
    ]
    lines += _verdict(summary)
    if "env_steps" in summary:
        lines.append(
            f"  {_steps(summary)} in {duration(summary.get('training_s'))} "
            f"({number(summary.get('steps_per_s'))}/s), "
            f"{summary.get('updates', 0):,} updates, {summary.get('episodes', 0):,} episodes, "
            f"mean return of the last ones {number(summary.get('mean_return'))}"
        )
    if staleness := summary.get("staleness"):
        figures = ", ".join(
            f"{key} {number(staleness[key])}"
            for key in ("min", "mean", "p99", "max")
            if key in staleness
        )
        lines.append(
            f"  staleness {figures}, bound {staleness.get('bound')}, "
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
        held = ", ".join(
            f"{WHO[side]} {duration(seconds)}" for side, seconds in replay["blocked_s"].items()
        )
        lines.append(
            f"  replay: {replay['inserted']:,} items inserted, {replay['drawn']:,} drawn, "
            f"{_ratio(replay)}, held back: {held}"
        )
    if unsaved := lost(summary):
        lines.append(f"  {unsaved}")
    if error := summary.get("error"):
        lines.append(f"  error: {error}")
    return "\n".join(lines)


def _steps(summary: Mapping[str, Any]) -> str:
    """Of a run that was resumed also those since then, which are what its seconds were spent on."""
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


def _verdict(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    if evaluation := summary.get("evaluation"):
        episodes, version = number(evaluation.get("episodes")), number(evaluation.get("version"))
        lines.append(
            f"  evaluation: mean return {number(evaluation.get('mean_return'))} over {episodes} "
            f"episodes, version {version}"
        )
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
