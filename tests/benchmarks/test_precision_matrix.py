"""Tests of the study of precisions: its runs and its table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import matrix
from benchmarks.lib.matrix import POINTS, Record, at
from benchmarks.studies.precision import SECONDS, cases, table
from tianflow.config.loading import load_config

CURVE = [(10.0, 1000, None), (170.0, 20_000, -20.5), (350.0, 40_000, -18.0), (539.0, 60_000, -9.0)]


def summary(**changes: Any) -> dict[str, Any]:
    given = {
        "env_steps": 60_000,
        "steps_per_s": 110.0,
        "staleness": {"mean": 1.5, "max": 2, "violations": 0},
        "curve": CURVE,
    }
    return {**given, **changes}


def test_the_runs_of_a_seed_differ_in_precision_alone() -> None:
    found = [load_config(case.config, case.settings(3)) for case in cases()]
    precisions = [(config.learner.precision, config.actors.precision) for config in found]
    assert precisions == [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
    assert {config.run.max_seconds for config in found} == {SECONDS}
    alike = [
        config.model_copy(
            update={"learner": None, "actors": config.actors.model_copy(update={"precision": None})}
        )
        for config in found
    ]
    assert 1 == len({config.model_dump_json(warnings=False) for config in alike})


def test_the_return_at_a_place_is_the_last_known_one_before_it() -> None:
    assert [at(CURVE, 0, t) for t in (100.0, 180.0, 349.0, 540.0)] == [None, -20.5, -20.5, -9.0]
    assert [at(CURVE, 1, steps) for steps in (1000, 40_000)] == [None, -18.0]


def test_the_table_compares_at_times_and_at_the_steps_of_the_slowest() -> None:
    slow = summary(env_steps=41_000, steps_per_s=76.0, curve=CURVE[:3])
    lines = table(
        [Record("fp32", 1, "", slow), Record("bf16", 1, "", summary())], cases()
    ).splitlines()[-2:]
    at_times = "– | -20.5 (-20.5 – -20.5)"
    assert lines == [
        (
            f"| fp32 | 1 | 76 (76 – 76) | {at_times} | -18.0 (-18.0 – -18.0) | -18.0 (-18.0 – -18.0) "
            "| 1.50 | 2 | 0 |"
        ),
        (
            f"| bf16 | 1 | 110 (110 – 110) | {at_times} | -18.0 (-18.0 – -18.0) | -18.0 (-18.0 – "
            "-18.0) | 1.50 | 2 | 0 |"
        ),
    ]


def test_a_run_keeps_its_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        run = Path(command[command.index("--runs-dir") + 1]) / "a-run"
        run.mkdir()
        rows = [
            {
                "t": float(t),
                "span_s": 1.0,
                "env_steps": 100 * t,
                "mean_return": None if t < 9 else -20.0,
            }
            for t in range(1, 301)
        ]
        (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(command, 0, '{"run": "a-run"}\n', "")

    monkeypatch.setattr(subprocess, "run", trained)
    curve = matrix.train(cases()[0], 1).summary["curve"]
    assert len(curve) <= POINTS
    assert curve[0][2] is None
    assert curve[-1] == (300.0, 30_000, -20.0)
