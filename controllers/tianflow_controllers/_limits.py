"""Helpers that controllers share: limits of credits, and checks of parameters."""

from __future__ import annotations

from math import inf

from tianflow.core.events import Observed
from tianflow.core.payloads import credits_ceiling


def feeding(credit_count: int, batch: int) -> int:
    """``credit_count``, but at least one batch: fewer credits could never feed the learner."""
    return max(batch, credit_count)


def ceiling(observed: Observed, publish_lag: int) -> int:
    """C_max at ``publish_lag``, at least B; all slots when the staleness is unbounded."""
    bound, batch = observed.max_staleness, observed.batch
    if bound is None:
        return feeding(observed.slots, batch)
    return feeding(credits_ceiling(bound, publish_lag=publish_lag, batch=batch), batch)


def turnover(credit_count: int, batch: int) -> int:
    """ceil(C/B): updates until all tickets that now hold a credit have been used in training."""
    return -(-credit_count // batch)


def whole(name: str, value: float, *, at_least: int, otherwise: str) -> int:
    """``value`` as a whole number of at least ``at_least``.

    Raises:
        ValueError: it is not; ``otherwise`` is the consequence.
    """
    if not at_least <= value < inf or value != int(value):
        raise ValueError(
            f"{name} = {value!r}: {otherwise}; accepted: a whole number, at least {at_least}"
        )
    return int(value)


def between(name: str, value: float, *, low: float, high: float, otherwise: str) -> float:
    """``value``, strictly between ``low`` and ``high``.

    Raises:
        ValueError: it is not; ``otherwise`` is the consequence.
    """
    if not low < value < high:
        raise ValueError(
            f"{name} = {value!r}: {otherwise}; accepted: more than {low}, less than {high}"
        )
    return float(value)
