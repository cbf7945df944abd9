"""What the controllers share: the ceiling of credits, and checks of their parameters."""

from __future__ import annotations

from math import inf

from tianflow.core.events import Observed


def feeding(credit_count: int, batch: int) -> int:
    """``credit_count``, but at least one batch: fewer could never feed the learner, whatever else
    holds.
    """
    return max(batch, credit_count)


def ceiling(observed: Observed, publish_lag: int) -> int:
    """C_max = (max_staleness + 1 - publish lag) * B, at least B; all slots when the staleness is
    unbounded.

    With more credits than this a trajectory could begin that is too stale when its turn comes.
    """
    if observed.max_staleness is None:
        return feeding(observed.slots, observed.batch)
    return feeding((observed.max_staleness + 1 - publish_lag) * observed.batch, observed.batch)


def turnover(credit_count: int, batch: int) -> int:
    """ceil(C/B): updates until everything that holds a credit now has been trained on."""
    return -(-credit_count // batch)


def whole(name: str, value: float, *, at_least: int, otherwise: str) -> int:
    """``value`` as a whole number of at least ``at_least``.

    Raises:
        ValueError: it is not one; ``otherwise`` says what would follow from it.
    """
    if not at_least <= value < inf or value != int(value):
        raise ValueError(
            f"{name} = {value!r}: {otherwise}; accepted: a whole number, at least {at_least}"
        )
    return int(value)


def between(name: str, value: float, *, low: float, high: float, otherwise: str) -> float:
    """``value``, strictly between ``low`` and ``high``.

    Raises:
        ValueError: it is not; ``otherwise`` says what would follow from it.
    """
    if not low < value < high:
        raise ValueError(
            f"{name} = {value!r}: {otherwise}; accepted: more than {low}, less than {high}"
        )
    return float(value)
