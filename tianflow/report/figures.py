"""Which charts a run gets: from the rows of its history to figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tianflow.report.charts import COLOURS, Band, Dot, Line, Mark, line_chart, share_chart
from tianflow.report.markup import Markup
from tianflow.report.records import Records, number_at

BLUE, ORANGE, GREEN, PINK, PURPLE, GREY, TEAL, OLIVE = range(COLOURS)
STATES = {
    "busy": GREEN,
    "waiting:batch": ORANGE,
    "waiting:grant": ORANGE,
    "waiting:turn": OLIVE,
    "paused": PURPLE,
    "checkpoint": BLUE,
    "rebuilding": PINK,
    "starting": GREY,
}
"""States whose colour is the same on every page; the others get what is left."""


def figures(run: Records) -> list[Markup]:
    """All that there is something to show of; those of replay only for a run that has it."""
    times = [float(row["t"]) for row in run.rows]
    marks = _changes(run)
    charts = [
        _returns(run, times, marks),
        line_chart(
            key="speed",
            title="Speed",
            unit="environment steps/s",
            times=times,
            lines=[Line("steps/s", run.series("steps_per_s"), BLUE)],
            marks=marks,
        ),
        _staleness(run, times, marks),
        _shares(run, times, marks, "learner", "Learner: where its time goes"),
        _shares(run, times, marks, "actor", "Actors: where their time goes"),
        _queue(run, times, marks),
        _drops(run, times, marks),
    ]
    if any(row.get("replay") for row in run.rows):
        charts += _replay(run, times, marks)
    return charts


def _changes(run: Records) -> list[Mark]:
    found = []
    for mark in run.marks():
        t = number_at(mark, "t") or 0.0
        if mark.get("kind") == "resumed":
            found.append(Mark(t, "resumed"))
        elif mark.get("kind") == "change":
            paths = mark.get("paths")
            names = (
                ", ".join(map(str, paths))
                if isinstance(paths, Sequence) and not isinstance(paths, str)
                else ""
            )
            found.append(Mark(t, names or str(mark.get("action", "change"))))
    return found


def _returns(run: Records, times: Sequence[float], marks: Sequence[Mark]) -> Markup:
    dots = []
    for mark in run.marks():
        value = number_at(mark, "mean_return")
        if mark.get("kind") == "evaluation" and value is not None:
            label = f"evaluation of version {number_at(mark, 'version') or 0:.0f}: {value:.4g}"
            dots.append(Dot(number_at(mark, "t") or 0.0, value, label))
    lines = [Line("mean of the last 100 episodes", run.series("mean_return"), BLUE)]
    target = number_at(run.config, "run", "target_return")
    if target is not None and times:
        lines.append(Line("target", [target] * len(times), GREEN, steps=True))
    return line_chart(
        key="return",
        title="Return",
        unit="per episode",
        times=times,
        lines=lines,
        dots=dots,
        dots_name="evaluations",
        marks=marks,
        zero=False,
    )


def _staleness(run: Records, times: Sequence[float], marks: Sequence[Mark]) -> Markup:
    low, high = run.series("staleness", "min"), run.series("staleness", "max")
    bounds = run.series("staleness", "bound")
    name = "bound" if any(bound is not None for bound in bounds) else "bound: none"
    return line_chart(
        key="staleness",
        title="Staleness",
        unit="updates behind, of what was trained on",
        times=times,
        band=Band("least to greatest", low, high, BLUE),
        lines=[
            Line("mean", run.series("staleness", "mean"), BLUE),
            Line(name, bounds, ORANGE, steps=True),
        ],
        marks=marks,
        whole=True,
    )


def _shares(
    run: Records, times: Sequence[float], marks: Sequence[Mark], role: str, title: str
) -> Markup:
    rows = [
        shares if isinstance(shares := _at(row, "shares", role), Mapping) else {}
        for row in run.rows
    ]
    totals: dict[str, float] = {}
    for row in rows:
        for state in row:
            totals[str(state)] = totals.get(str(state), 0.0) + (number_at(row, state) or 0.0)
    states = sorted(totals, key=lambda state: (state != "busy", -totals[state], state))
    parts = {
        state: [None if not row else number_at(row, state) or 0.0 for row in rows]
        for state in states
    }
    return share_chart(
        key=f"{role}-time",
        title=title,
        times=times,
        parts=parts,
        colours=_colours(states),
        marks=marks,
    )


def _colours(states: Sequence[str]) -> dict[str, int]:
    taken = {STATES[state] for state in states if state in STATES}
    free = [colour for colour in range(COLOURS) if colour not in taken] or list(range(COLOURS))
    others = [state for state in states if state not in STATES]
    return {state: STATES[state] for state in states if state in STATES} | {
        state: free[at % len(free)] for at, state in enumerate(others)
    }


def _at(row: object, *path: str) -> object:
    for key in path:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def _queue(run: Records, times: Sequence[float], marks: Sequence[Mark]) -> Markup:
    return line_chart(
        key="queue",
        title="Queue and credits",
        unit="trajectories",
        times=times,
        lines=[
            Line("waiting to be trained on", run.series("queue"), BLUE),
            Line("credits in use", run.series("credits", "in_use"), GREEN),
            Line("limit of credits", run.series("credits", "limit"), ORANGE, steps=True),
        ],
        marks=marks,
        whole=True,
    )


def _drops(run: Records, times: Sequence[float], marks: Sequence[Mark]) -> Markup:
    drops = [
        dropped if isinstance(dropped := row.get("dropped"), Mapping) else {} for row in run.rows
    ]
    reasons = sorted({str(reason) for dropped in drops for reason in dropped})
    lines = [
        Line(reason, [number_at(dropped, reason) or 0.0 for dropped in drops], at % COLOURS)
        for at, reason in enumerate(reasons)
    ]
    return line_chart(
        key="drops",
        title="Dropped",
        unit="trajectories, since the process began",
        times=times,
        lines=lines or [Line("none", [0.0] * len(times), GREEN)],
        marks=marks,
        whole=True,
    )


def _replay(run: Records, times: Sequence[float], marks: Sequence[Mark]) -> list[Markup]:
    return [
        line_chart(
            key="replay-items",
            title="Replay",
            unit="items",
            times=times,
            lines=[
                Line("items", run.series("replay", "items"), BLUE),
                Line("capacity", run.series("replay", "capacity"), ORANGE, steps=True),
            ],
            marks=marks,
            whole=True,
        ),
        line_chart(
            key="replay-ratio",
            title="Samples per insert",
            unit="since the process began",
            times=times,
            lines=[
                Line("samples per insert", run.series("replay", "samples_per_insert"), BLUE),
                Line(
                    "to keep to",
                    run.series("replay", "samples_per_insert_target"),
                    ORANGE,
                    steps=True,
                ),
            ],
            marks=marks,
        ),
        line_chart(
            key="replay-held",
            title="Held back by replay",
            unit="share of time",
            times=times,
            lines=[
                Line("actors (insert)", run.series("replay", "held_back", "insert"), GREEN),
                Line("learner (draw)", run.series("replay", "held_back", "draw"), ORANGE),
            ],
            marks=marks,
        ),
    ]
