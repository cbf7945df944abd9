"""Numbers that are told of counts: the same wherever they are told."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

from tests.support.fakes_run import FakeRun
from tianflow.core.statistics import quantile
from tianflow.observability.recorder import staleness_between
from tianflow.observability.run_document import staleness_summary
from tianflow.rundir.summary import summarise


def test_a_quantile_is_the_value_of_the_nearest_rank() -> None:
    source = random.Random(1)
    for size in (1, 2, 99, 100, 101, 1000):
        values = sorted(source.randrange(7) for _ in range(size))
        for part in (0.5, 0.99):
            assert values[math.ceil(part * size) - 1] == quantile(Counter(values), part)
    assert quantile({}, 0.5) is None


def test_screen_history_and_summary_tell_one_percentile_of_the_same_staleness() -> None:
    """Of a hundred, one is old: 99 % are not."""
    run = FakeRun().statistics()
    ledger = replace(run.ledger, staleness={0: 99, 5: 1}, recent_staleness=(0,) * 99 + (5,))
    run = replace(run, ledger=ledger)
    summary = summarise(run, reason="", target_reached=False, training_s=1.0, seed=1, error=None)
    assert 0 == staleness_summary(ledger).p99 == staleness_between(None, run).p99
    assert {"mean": 0.05, "p99": 0, "max": 5} == {
        key: summary["staleness"][key] for key in ("mean", "p99", "max")
    }  # type: ignore[index]
