"""Learning statistics: named numbers of updates and episodes, in sums that give a mean of any span.

A `LearningTally` accumulates them in a component. `tianflow.observability.learning` makes the means
of a run of them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tianflow.logs import logger

MOST_NAMES = 64
"""Maximum number of names, in a component and in a run: each is a field of every row, a series and
a curve.
"""
LONGEST_NAME = 80
_NAME = re.compile(r"[A-Za-z_][\w.-]*(?:/\w[\w.-]*)*", re.ASCII)
"""Names that every sink accepts, some of which make paths of them."""
GREATEST = 1e300
"""Of a value, so that a sum of values does not overflow."""

log = logger("learning")


class StatisticSum(NamedTuple):
    """``number`` values with the sum ``total + rest``; ``last`` is the newest of them.

    ``rest`` has what rounding takes from ``total``. Without it one value of 1e20, as a loss that
    diverges has it, would hide all later values of the run.
    """

    number: int
    total: float
    rest: float
    last: float

    def after(self, earlier: StatisticSum) -> StatisticSum:
        """These values and ``earlier`` ones."""
        total, error = _exact_sum(earlier.total, self.total)
        rest = earlier.rest + self.rest + error
        return StatisticSum(self.number + earlier.number, total, rest, self.last)

    def since(self, earlier: StatisticSum) -> StatisticSum:
        """The values after ``earlier``."""
        total, rest = self.total - earlier.total, self.rest - earlier.rest
        return StatisticSum(self.number - earlier.number, total, rest, self.last)

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return (self.total + self.rest) / self.number


def _exact_sum(a: float, b: float) -> tuple[float, float]:
    """The rounded sum, and the error of rounding (Knuth, The Art of Computer Programming, vol. 2,
    4.2.2, theorem B).
    """
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


Sums = Mapping[str, StatisticSum]
"""By the name of the statistic."""


class LearningTally:
    """Accumulates the statistics of one component.

    The values come from an algorithm or an environment, which may be a user's: what is not a number
    with a valid name is refused and counted, and costs nothing else.

    Args:
        group: first part of the names that have no group of their own: ``train`` makes
            ``train/loss`` of ``loss``.
        source: owner of the statistics in a warning.
        most: maximum number of names.
    """

    def __init__(self, *, group: str, source: str, most: int = MOST_NAMES) -> None:
        self._group, self._source, self._most = group, source, most
        self._names: dict[object, str] = {}
        # Lists, because an update changes every sum: a tuple would cost as much as the arithmetic.
        self._sums: dict[str, list[Any]] = {}
        """Fields of `StatisticSum`, by name as given."""
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.refused = 0
        """Number of refused values."""

    def accept(self, given: Mapping[str, object]) -> dict[str, float]:
        """The numbers in ``given`` by their own names. Tensors and arrays of one element count.

        A value that is not finite is accepted: `add` skips it.
        """
        names, found = self._names, {}
        for key, value in given.items():
            number = value if type(value) is float else as_number(value)
            if number is None:
                self._refuse("value", f"{key!r:.80} is {value!r:.80}", "a number")
            elif key in names or self._admit(key):
                found[key] = number
        return found

    def add(self, numbers: Mapping[str, float]) -> None:
        """Count accepted ``numbers``. Those that are not finite are skipped: one of them would be
        the mean for ever.
        """
        sums = self._sums
        with self._lock:
            for key, number in numbers.items():
                if not -GREATEST <= number <= GREATEST:  # nor NaN
                    continue
                if key not in sums:
                    sums[key] = [0, 0.0, 0.0, 0.0]
                values = sums[key]
                # `_exact_sum` in place
                before = values[1]
                total = before + number
                part = total - before
                values[0] += 1
                values[1] = total
                values[2] += (before - (total - part)) + (number - part)
                values[3] = number

    def read(self) -> dict[str, StatisticSum]:
        """The sums so far, by full name. Another thread may add meanwhile."""
        with self._lock:
            return {self._names[key]: StatisticSum(*values) for key, values in self._sums.items()}

    def _admit(self, key: object) -> bool:
        """Take ``key`` as a name if it is valid and there is room."""
        if not isinstance(key, str) or len(key) > LONGEST_NAME or not _NAME.fullmatch(key):
            accepted = f"at most {LONGEST_NAME} letters, digits and _ . - with / between groups"
            self._refuse("name", f"{key!r:.80} is not a valid name", accepted)
            return False
        name = key if "/" in key else f"{self._group}/{key}"
        if name in self._names.values():
            self._refuse("name", f"{key!r} and another name mean {name!r}", "different names")
            return False
        if len(self._names) >= self._most:
            self._refuse("number", f"{name!r} is one name too many", f"{self._most} names")
            return False
        self._names[key] = name
        return True

    def _refuse(self, kind: str, problem: str, accepted: str) -> None:
        """Count a refused value. The log has the first of each kind."""
        self.refused += 1
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(
                "a statistic is not recorded",
                source=self._source,
                problem=problem,
                accepted=accepted,
            )


def as_number(value: object) -> float | None:
    """``value``, or its only element, as a float; None if it is not a number."""
    if not isinstance(value, int | float):
        item = getattr(value, "item", None)
        if not callable(item):
            return None
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # it has more than one element
            return None
        if not isinstance(value, int | float):
            return None
    try:
        return float(value)
    except OverflowError:
        return None


def between(before: Sums, now: Sums) -> dict[str, StatisticSum]:
    """The values between two moments; names without any are omitted."""
    found = {}
    for name, own in now.items():
        old = before.get(name)
        if old is None:
            found[name] = own
        elif own.number > old.number:
            found[name] = own.since(old)
    return found


def together(parts: Iterable[Sums], *, most: int = MOST_NAMES) -> dict[str, StatisticSum]:
    """The values of several components; of more names than ``most`` the first ones."""
    found: dict[str, StatisticSum] = {}
    for part in parts:
        for name, own in part.items():
            if name in found:
                found[name] = own.after(found[name])
            elif len(found) < most:
                found[name] = own
    return found
