"""The history of a run: `HistoryRow`, and ``history.jsonl`` with a bounded number of them.

A line is written about once a second. At `LIMIT` lines, neighbours are merged: half of the lines
remain, and each covers twice the time. So there are always between half of `LIMIT` and `LIMIT`
lines, evenly spaced over the whole run. A merged line retains the extremes of staleness, and the
newest `MARKS` evaluations, changes and resumes each, with the number of those dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from tianflow.core.files import read_regular
from tianflow.core.jsonable import JsonDocument, json_ready
from tianflow.core.moments import Moments
from tianflow.rundir.manifest import LARGEST, Count

NAME = "history.jsonl"
LIMIT = 2000
SPACING_S = 1.0
MARKS = 16
"""Per kind and line: a program that changes settings all the time leaves room for evaluations."""

Level = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
"""A whole number that a float holds exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStaleness(JsonDocument):
    """Staleness of the trajectories trained on during a span; None without any."""

    count: Count = 0
    min: Level | None = None
    mean: float | None = None
    p99: Level | None = None
    """Of merged lines the largest of theirs."""
    max: Level | None = None
    bound: Count | None = None
    """Largest bound in force during the span; None: unbounded."""
    counts: Mapping[str, Count] = field(default_factory=dict)
    """Number of trajectories by staleness, from 16 on to three binary digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditsInForce(JsonDocument):
    """Credits at the end of a span."""

    limit: Level
    in_use: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCounts(JsonDocument):
    """Replay at the end of a span. Counts are since the process began."""

    items: Count | None
    """None while every shard is down: their contents are unknown."""
    capacity: Count
    inserted: Count
    drawn: Count
    trained: Count
    discarded: Mapping[str, Count]
    """By reason."""
    samples_per_insert: float
    samples_per_insert_target: float | None
    held_back: Mapping[str, float]
    """Share of the span for which inserts and draws were blocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningMean(JsonDocument):
    """Mean of a learning statistic over the values of a span."""

    count: Count
    """Number of updates or episodes with a finite value."""
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow(JsonDocument):
    """A run over one span of time. Counts are since the run began, unless said otherwise. Lines of
    older versions lack some fields.
    """

    t: float
    """End of the span, in seconds since the run began, resumed parts included."""
    span_s: float
    """Length of the span in seconds."""
    time: float
    """Unix time of its end."""
    state: str
    env_steps: Count
    updates: Count
    episodes: Count
    mean_return: float | None
    """Mean return of the last 100 episodes of training."""
    mean_length: float | None
    """Mean length of the same episodes, in steps."""
    learning: Mapping[str, LearningMean]
    """Statistics of updates (``train/...``) and of episodes (``rollout/...``) over the span."""
    steps_per_s: float | None
    """Environment steps per second over the span."""
    updates_per_s: float | None
    """Updates per second over the span."""
    staleness: TrainedStaleness
    queue: Count
    """Trajectories that wait for the learner."""
    credits: CreditsInForce
    shares: Mapping[str, Mapping[str, float]]
    """Shares of time by role and state, over the span or the last five seconds if it is shorter."""
    durations: Mapping[str, Mapping[str, float | None]]
    """Durations of trajectories and updates by role (`tianflow.core.moments.durations`)."""
    dropped: Mapping[str, Count]
    """Dropped trajectories by reason, since the process began."""
    violations: Count
    """Trajectories trained on beyond the bound, since the process began: always 0."""
    replay: ReplayCounts | None
    """None without replay."""
    bottleneck: str
    """Verdict of the diagnosis."""
    generation: Count
    """Generation of the settings in force."""
    marks: Sequence[Mapping[str, Any]]
    """Events of the span, each with ``t`` and ``kind``: evaluation, change or resumed. A further
    evaluation has its ``name``.
    """
    marks_left_out: Count
    """Number of marks that were dropped to bound the line."""


Row = dict[str, Any]
"""A `HistoryRow` as JSON: one line of the file."""


def read_rows(path: Path) -> list[Row]:
    """Every line that is an object with a time, oldest first. A torn line is skipped, and so is a
    field whose value is not one of `HistoryRow`. Empty without a file.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        return parse_rows(read_regular(path))
    except FileNotFoundError:
        return []


def parse_rows(data: bytes) -> list[Row]:
    """As `read_rows`, of the contents of a file."""
    return [row for row in map(_read, data.splitlines()) if row is not None]


def _read(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
        _checker().validate_json(line, strict=True)
    except ValidationError as error:
        problems = error.errors()
        wrong = {
            problem["loc"][0]
            for problem in problems
            if problem["loc"] and problem["type"] != "missing"
        }
        # Without a place the line is wrong as a whole, as with half of a surrogate pair in a text.
        if not all(problem["loc"] for problem in problems):
            return None
        if not isinstance(row, dict) or not is_number(row.get("t")):
            return None
        return {key: value for key, value in row.items() if key not in wrong}
    except (ValueError, RecursionError):
        return None
    return dict(row)


@cache
def _checker() -> TypeAdapter[HistoryRow]:
    return TypeAdapter(HistoryRow)


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """``rows`` with neighbours merged, until there are at most ``most`` of them."""
    found = list(rows)
    while len(found) > most:
        found = _halved(found)
    return found


def _halved(rows: Sequence[Row]) -> list[Row]:
    return [
        merged(*rows[at : at + 2]) if at + 1 < len(rows) else rows[at]
        for at in range(0, len(rows), 2)
    ]


def is_number(value: object) -> bool:
    """True for a finite number that a float can hold."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


# Merging
# --------------------------------------------------------------------------------------------------


def merged(older: Row, newer: Row) -> Row:
    """One line for two neighbours: the newer state, means over time, extremes and marks of both."""
    spans = (float(older.get("span_s") or 0.0), float(newer.get("span_s") or 0.0))
    row = dict(newer)
    row["span_s"] = sum(spans)
    for rate in ("steps_per_s", "updates_per_s"):
        row[rate] = _mean(older.get(rate), newer.get(rate), spans)
    row["staleness"] = _merged_staleness(older.get("staleness") or {}, newer.get("staleness") or {})
    row["learning"] = _merged_learning(older.get("learning") or {}, newer.get("learning") or {})
    row["shares"] = _merged_shares(older.get("shares") or {}, newer.get("shares") or {}, spans)
    row["durations"] = _merged_durations(older.get("durations") or {}, newer.get("durations") or {})
    row["marks"], cut = newest_marks([*(older.get("marks") or ()), *(newer.get("marks") or ())])
    row["marks_left_out"] = cut + sum(
        int(part.get("marks_left_out") or 0) for part in (older, newer)
    )
    return row


def newest_marks(marks: Sequence[Row]) -> tuple[list[Row], int]:
    """The newest `MARKS` marks of each kind in their order, and the number of the others. Each
    further evaluation is a kind of its own.
    """
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for mark in reversed(marks):
        kind = str(mark.get("kind")), str(mark.get("name"))
        seen[kind] += 1
        if seen[kind] <= MARKS:
            kept.append(mark)
    return kept[::-1], len(marks) - len(kept)


def _mean(older: float | None, newer: float | None, weights: tuple[float, float]) -> float | None:
    if older is None or newer is None or sum(weights) <= 0.0:
        return older if newer is None else newer
    return (older * weights[0] + newer * weights[1]) / sum(weights)


def _merged_staleness(older: Mapping[str, Any], newer: Mapping[str, Any]) -> Row:
    counts = (older.get("count") or 0, newer.get("count") or 0)
    bounds = [part["bound"] for part in (older, newer) if "bound" in part]

    def extreme(choose: Callable[[Sequence[float]], float], key: str) -> float | None:
        values = [part[key] for part in (older, newer) if part.get(key) is not None]
        return choose(values) if values else None

    return {
        "count": sum(counts),
        "min": extreme(min, "min"),
        "mean": _mean(older.get("mean"), newer.get("mean"), counts),
        "p99": extreme(max, "p99"),
        "max": extreme(max, "max"),
        "bound": None if None in bounds else max(bounds, default=None),
        "counts": _added(older.get("counts") or {}, newer.get("counts") or {}),
    }


def _merged_learning(older: Mapping[str, Row], newer: Mapping[str, Row]) -> dict[str, Row]:
    found = {**older, **newer}
    for name in older.keys() & newer.keys():
        parts = (older[name], newer[name])
        counts = (parts[0].get("count") or 0, parts[1].get("count") or 0)
        mean = _mean(parts[0].get("mean"), parts[1].get("mean"), counts)
        found[name] = {"count": sum(counts), "mean": mean}
    return found


def _added(older: Mapping[str, int], newer: Mapping[str, int]) -> dict[str, int]:
    return {age: older.get(age, 0) + newer.get(age, 0) for age in {**older, **newer}}


def _merged_durations(
    older: Mapping[str, Any], newer: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for role in {**older, **newer}:
        parts = [part[role] for part in (older, newer) if role in part]
        # Fields besides the moments describe the whole run so far, so the newer line has them.
        found[role] = parts[-1] | sum(map(Moments.read, parts), Moments()).summary()
    return found


def _merged_shares(
    older: Mapping[str, Any], newer: Mapping[str, Any], spans: tuple[float, float]
) -> dict[str, dict[str, float]]:
    shares: dict[str, dict[str, float]] = {}
    for role in {**older, **newer}:
        if role not in older or role not in newer or sum(spans) <= 0.0:
            shares[role] = dict(newer.get(role, older.get(role, {})))
            continue
        states = {**older[role], **newer[role]}
        shares[role] = {
            state: _mean(older[role].get(state, 0.0), newer[role].get(state, 0.0), spans) or 0.0
            for state in states
        }
    return shares


# On disk
# --------------------------------------------------------------------------------------------------


class HistoryFile:
    """The file, with at most ``limit`` lines. Every method waits for the disk.

    Args:
        path: of the file; an existing one is continued.
        limit: maximum number of lines.
        spacing_s: seconds that a line covers at first.
    """

    def __init__(self, path: Path, *, limit: int = LIMIT, spacing_s: float = SPACING_S) -> None:
        if limit < 2:
            raise ValueError(f"limit = {limit}: merging needs two lines; accepted: 2 or more")
        self._path, self._limit = path, limit
        self._lines = 0
        self._whole = True
        self.period_s = spacing_s
        """Seconds that a line covers."""

    def open(self) -> float | None:
        """Read an existing file; the time of its last line, None without lines. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._whole = read_regular(self._path)[-1:] in (b"\n", b"")
        rows = read_rows(self._path)
        if not rows:
            return None
        self._lines = len(rows)
        last = max(float(row["t"]) for row in rows)
        while last - float(rows[0]["t"]) > self._limit * self.period_s:
            self.period_s *= 2.0
        return last

    def append(self, row: Row) -> None:
        """Add a line. Raises OSError; readers skip a line that was torn by it."""
        while self._lines >= self._limit:
            self._thin()
        text = ("" if self._whole else "\n") + _line(row)
        self._whole = False
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
        self._whole = True
        self._lines += 1
        if self._lines >= self._limit:  # now, so the next line is a whole period away
            with contextlib.suppress(OSError):  # this line is written, and the next one tries again
                self._thin()

    def _thin(self) -> None:
        pairs = _halved(read_rows(self._path))
        temporary = self._path.with_name(f".{NAME}.{os.getpid()}")
        try:
            temporary.write_text("".join(map(_line, pairs)), encoding="utf-8")
            temporary.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._lines, self._whole = len(pairs), True
        self.period_s *= 2.0


def _line(row: Row) -> str:
    return json.dumps(json_ready(row), separators=(",", ":"), allow_nan=False) + "\n"
