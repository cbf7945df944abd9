"""``history.jsonl``: how a run went, in a bounded number of lines.

A line is written about every second. When there are `LIMIT` of them, neighbours are merged, which
halves them, and from then on a line covers twice the time: at any time there are between half of
`LIMIT` and `LIMIT` lines, evenly spaced over the whole run. Merging keeps what must not be lost:
the extremes of staleness, and what was evaluated and changed (the newest `MARKS` of each kind a
line; how many more there were is counted).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tianflow.core.jsonable import json_ready
from tianflow.core.moments import Moments

NAME = "history.jsonl"
LIMIT = 2000
SPACING_S = 1.0
MARKS = 16
"""Of one kind in one line: programs that turn a knob all the time leave room for what was
evaluated.
"""

Row = dict[str, Any]
"""One line. Numbers count since the run began unless said otherwise; None is what is not known.

``t``: seconds since the run began, resumed ones continued. ``span_s``: seconds that the line
covers, up to ``t``. ``time``: Unix time. ``env_steps``, ``updates``, ``episodes``; ``mean_return``
of the last 100 episodes. Over the span: ``steps_per_s``, ``updates_per_s``; ``staleness``
(``count`` trained, ``min``, ``mean``, ``p99``, ``max``, and the widest ``bound`` in force, None:
unbounded; the p99 of merged lines is the largest of theirs; ``counts`` by staleness, from 16 on to
three binary digits); ``shares`` of time by role and state, of the last five seconds where the span
is shorter; ``durations`` of trajectories and updates by role (`tianflow.core.moments.durations`;
runs of earlier versions have none). At ``t``: ``queue`` (trajectories), ``credits`` (``limit``,
``in_use``), ``state``, ``bottleneck``, ``generation``. Since this process began: ``dropped`` by
reason, ``violations``, ``replay`` (None without). ``marks``: what happened in the span, each with
its ``t`` and ``kind``: evaluation, change or resumed. ``marks_left_out``: how many more there were.
"""


def read_rows(path: Path) -> list[Row]:
    """Every whole line that is an object with a time, oldest first; a line that was torn is passed
    over, and so is what a line holds in another shape than `Row` has. Empty without a file.

    Raises:
        OSError: there is a file, and it cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and is_number(row.get("t")):
            rows.append({key: value for key, value in row.items() if _SHAPES.get(key, _any)(value)})
    return rows


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """``rows``, neighbours merged until there are at most ``most`` of them."""
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


def _any(_: object) -> bool:
    return True


def _known(value: object) -> bool:
    return value is None or is_number(value)


def _numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _is_staleness(value: object) -> bool:
    return isinstance(value, dict) and all(
        (_numbers if key == "counts" else _known)(inner) for key, inner in value.items()
    )


def _is_shares(value: object) -> bool:
    return isinstance(value, dict) and all(map(_numbers, value.values()))


def _are_durations(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(inner, dict) and all(map(_known, inner.values())) for inner in value.values()
    )


def _are_marks(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(mark, dict) for mark in value)


_SHAPES: Mapping[str, Callable[[object], bool]] = {
    "span_s": _known,
    "steps_per_s": _known,
    "updates_per_s": _known,
    "staleness": _is_staleness,
    "shares": _is_shares,
    "durations": _are_durations,
    "marks": _are_marks,
    "marks_left_out": _known,
}
"""What merging counts on."""


# Merging
# --------------------------------------------------------------------------------------------------


def merged(older: Row, newer: Row) -> Row:
    """One line for two that follow each other: the newer state of affairs, means by time, extremes
    of both, and the marks of both.
    """
    spans = (float(older.get("span_s") or 0.0), float(newer.get("span_s") or 0.0))
    row = dict(newer)
    row["span_s"] = sum(spans)
    for rate in ("steps_per_s", "updates_per_s"):
        row[rate] = _mean(older.get(rate), newer.get(rate), spans)
    row["staleness"] = _merged_staleness(older.get("staleness") or {}, newer.get("staleness") or {})
    row["shares"] = _merged_shares(older.get("shares") or {}, newer.get("shares") or {}, spans)
    row["durations"] = _merged_durations(older.get("durations") or {}, newer.get("durations") or {})
    row["marks"], cut = newest_marks([*(older.get("marks") or ()), *(newer.get("marks") or ())])
    row["marks_left_out"] = cut + sum(
        int(part.get("marks_left_out") or 0) for part in (older, newer)
    )
    return row


def newest_marks(marks: Sequence[Row]) -> tuple[list[Row], int]:
    """The newest `MARKS` of each kind, in their order, and how many that leaves out."""
    seen: Counter[str] = Counter()
    kept = []
    for mark in reversed(marks):
        kind = str(mark.get("kind"))
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


def _added(older: Mapping[str, int], newer: Mapping[str, int]) -> dict[str, int]:
    return {age: older.get(age, 0) + newer.get(age, 0) for age in {**older, **newer}}


def _merged_durations(
    older: Mapping[str, Any], newer: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for role in {**older, **newer}:
        parts = [part[role] for part in (older, newer) if role in part]
        # What is more than moments is of everything so far: the newer tells it.
        found[role] = parts[-1] | sum(map(Moments.read, parts), Moments()).told()
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
    """Lines on disk, at most ``limit`` of them. Every method blocks.

    Args:
        path: of the file; goes on where one is there.
        limit: most lines.
        spacing_s: seconds that a line covers at first.
    """

    def __init__(self, path: Path, *, limit: int = LIMIT, spacing_s: float = SPACING_S) -> None:
        if limit < 2:
            raise ValueError(
                f"limit = {limit}: neighbours can only be merged where there are two lines"
            )
        self._path, self._limit = path, limit
        self._lines = 0
        self._whole = True
        self.period_s = spacing_s
        """Seconds that a line is to cover."""

    def open(self) -> float | None:
        """Look at what is there; the time of its last line, None without one. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._whole = self._path.read_bytes()[-1:] in (b"\n", b"")
        rows = read_rows(self._path)
        if not rows:
            return None
        self._lines = len(rows)
        last = max(float(row["t"]) for row in rows)
        while last - float(rows[0]["t"]) > self._limit * self.period_s:
            self.period_s *= 2.0
        return last

    def append(self, row: Row) -> None:
        """Add a line. Raises OSError; what was written by then is passed over by readers."""
        while self._lines >= self._limit:
            self._thin()
        text = ("" if self._whole else "\n") + _line(row)
        self._whole = False
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
        self._whole = True
        self._lines += 1
        if self._lines >= self._limit:  # now, so that the next line is a whole new period away
            with contextlib.suppress(OSError):  # this line is written; the next one tries again
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
