"""Annotations appear when something happens, and only then: evaluated by promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dashboards.annotations import annotations

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)
EVENTS = {event["name"]: event["expr"] for event in annotations()}
READY = {"ready": "1x20"}
"""Scraped every five seconds for 100 seconds."""
NAMES = {
    "ready": "tianflow_run_ready",
    "changes": "tianflow_settings_changes_total",
    "restarts": "tianflow_component_restarts_total",
    "attempts": "tianflow_checkpoint_attempts_total",
    "steps": "tianflow_env_steps_total",
    "all_steps": "tianflow_run_env_steps",
}


def happens(folder: Path, name: str, at: int, **series: str) -> bool:
    """Whether the annotation ``name`` is shown for run ``a``, ``at`` seconds after the start."""
    found = {}
    for shown in (True, False):
        samples = [{"labels": '{run="a"}', "value": 1.0}] if shown else []
        test: dict[str, Any] = {
            "interval": "5s",
            "input_series": [
                {
                    "series": f'{NAMES[key]}{{run="a"'
                    + (', component="actors-0", reason="died"' if key == "restarts" else "")
                    + "}",
                    "values": values,
                }
                for key, values in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f"({EVENTS[name]}) * 0 + 1".replace("$run", ".+").replace(
                        "$__rate_interval", "20s"
                    ),
                    "eval_time": f"{at}s",
                    "exp_samples": samples,
                }
            ],
        }
        file = folder / f"{shown}.yml"
        file.write_text(json.dumps({"evaluation_interval": "5s", "tests": [test]}))
        checked = subprocess.run(
            ["promtool", "test", "rules", str(file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        found[shown] = checked.returncode == 0
    assert found[True] != found[False], "neither one sample nor none"
    return found[True]


@pytest.mark.parametrize(("at", "shown"), [(40, False), (50, True), (60, True), (80, False)])
def test_a_change_is_shown_for_one_interval(tmp_path: Path, at: int, shown: bool) -> None:
    assert shown == happens(tmp_path, "Changes", at, changes="0x9 1x11", **READY)


@pytest.mark.parametrize(("at", "shown"), [(40, False), (55, True), (80, False)])
def test_the_first_restart_is_shown_although_its_series_is_new(
    tmp_path: Path, at: int, shown: bool
) -> None:
    assert shown == happens(tmp_path, "Restarts", at, restarts="_x9 1x11", **READY)
    assert shown == happens(tmp_path, "Restarts", at, restarts="3x9 4x11", **READY)


def test_restarts_before_the_first_scrape_are_not_shown(tmp_path: Path) -> None:
    assert not happens(tmp_path, "Restarts", 5, restarts="3x20", **READY)
    assert not happens(tmp_path, "Checkpoints", 5, attempts="3x20", **READY)


def test_a_checkpoint_is_shown(tmp_path: Path) -> None:
    assert happens(tmp_path, "Checkpoints", 55, attempts="1x9 2x11", **READY)
    assert not happens(tmp_path, "Checkpoints", 40, attempts="1x9 2x11", **READY)


@pytest.mark.parametrize(("at", "shown"), [(40, False), (55, True), (90, False)])
def test_a_resume_is_shown_after_a_short_pause(tmp_path: Path, at: int, shown: bool) -> None:
    series = {"steps": "10+10x9 5+10x10", "all_steps": "10+10x20"}
    assert shown == happens(tmp_path, "Resumes", at, **series, **READY)


@pytest.mark.parametrize(("at", "shown"), [(20, False), (85, True), (100, False)])
def test_a_resume_is_shown_after_a_long_pause(tmp_path: Path, at: int, shown: bool) -> None:
    """No scrape for 50 seconds; Prometheus marks the series as stale at once."""
    series = {
        "steps": "10+10x5 stale _x9 5+10x8",
        "all_steps": "10+10x5 stale _x9 65+10x8",
        "ready": "1x5 stale _x9 1x8",
    }
    assert shown == happens(tmp_path, "Resumes", at, **series)


def test_the_first_process_of_a_run_is_no_resume(tmp_path: Path) -> None:
    series = {"steps": "_x9 10+10x11", "all_steps": "_x9 10+10x11", "ready": "_x9 1x11"}
    for at in (50, 55, 80):
        assert not happens(tmp_path, "Resumes", at, **series)
