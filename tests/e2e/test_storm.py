"""A short storm over real runs: roles are killed, stopped and hung while settings, disk and clock
change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib import child
from benchmarks.lib.storm.observers import BOUNDS, LIVE_LIMIT_S

pytestmark = [pytest.mark.e2e, pytest.mark.beside(lanes=2), pytest.mark.timeout(600)]
SECONDS = 12.0
"""The last round, and a calm life that resumes the run, come on top."""


@pytest.mark.parametrize(("kind", "seed"), [("use-once", 1), ("replay", 2)])
def test_a_run_keeps_its_promises_in_a_short_storm(kind: str, seed: int, tmp_path: Path) -> None:
    arguments = (kind, "short", SECONDS, seed, tmp_path)
    found = child.run("benchmarks.workers.storm", *arguments, timeout_s=500.0).answer
    assert [] == found["findings"]
    values = found["values"]
    struck = {name for name in values if name.startswith(("kill", "stop", "hang"))}
    assert len(struck) >= 4
    assert 1 <= values["resumes"]
    assert 1 <= values["judged ready"]
    for bound in BOUNDS:
        assert 1 <= values[f"updates judged at bound {bound}"]
    assert values["pairs of changes"] >= 5
    assert values["worst /livez without waits for a core"] <= LIVE_LIMIT_S
