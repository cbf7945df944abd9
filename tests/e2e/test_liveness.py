"""Hosts are judged by heartbeats and by the calls into their environments, whatever else is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tianflow.rundir.checkpoints import CheckpointStore

pytestmark = [pytest.mark.e2e, pytest.mark.beside(lanes=3), pytest.mark.timeout(400)]
TROUBLES = "tests.e2e.troubles"


def given_up(live: LiveRun) -> float:
    """Tickets that the ledger dropped while their actor went on."""
    reasons = ("straggler", "expired")
    return sum(
        live.metrics().get(("trajectories_dropped_total", reason), 0.0) for reason in reasons
    )


def test_a_hung_environment_is_replaced_although_its_ticket_was_given_up(tmp_path: Path) -> None:
    """The patience with a straggler ends before the time-out of a step."""
    with harness.run(
        tmp_path / "runs",
        env__id=f"{TROUBLES}:TroubleEnv",
        env__kwargs={"folder": str(tmp_path), "ways": ["hang"]},
        env__step_timeout_s=6.0,
        balance__max_staleness=2,
        balance__straggler_patience=0.2,
    ) as live:
        live.until("it hangs", (tmp_path / "hang").exists, within_s=harness.START_S)
        live.until("it is given up", lambda: given_up(live) >= 1.0)
        live.until("a restart", lambda: live.restarts() == 1.0)
        assert "env_hang" in live.stderr
        live.until("no slot in quarantine", lambda: live.metric("slots_quarantined") == 0.0)
        live.until("both actors", lambda: 2.0 == live.metric("actors"))
        live.until_training(more=5)


def test_rare_metrics_make_no_host_silent_in_a_pause_or_at_the_end(tmp_path: Path) -> None:
    """The last evaluation takes longer than the grace time, with no statistics between."""
    with harness.run(
        tmp_path,
        env__id="tests.e2e.troubles:SlowToEvaluateEnv",
        env__step_timeout_s=3.0,
        metrics__interval_s=600.0,
        run__grace_s=2.0,
        evaluation__episodes=1,
    ) as live:
        live.until_training(more=2)
        live.act("pause")
        begun = live.status()["elapsed_s"]
        live.until("a long pause", lambda: live.status()["elapsed_s"] - begun > 7.0)
        assert 0.0 == live.restarts()
        assert live.ready()
        live.act("resume")
        live.act("drain")
        assert 0 == live.end()
        assert live.result["evaluation"]["episodes"] == 1
        newest = CheckpointStore.load(live.checkpoints()[-1])
        assert live.result["updates"] == newest.version.number


def test_resets_that_take_longer_together_than_each_may_are_no_hang(tmp_path: Path) -> None:
    """All episodes of a vector end together, so one step resets every environment."""
    with harness.run(
        tmp_path,
        env__id="tests.e2e.troubles:SlowResetEnv",
        env__kwargs={"reset_s": 1.5, "length": 4},
        env__num_envs=4,
        env__step_timeout_s=3.0,
        env__start_timeout_s=5.0,  # less than the 6 s of all first resets
        actors__count=1,
        actors__hosts=1,
        actors__rollout_steps=8,
    ) as live:
        live.until_training(more=2)
        assert 0.0 == live.restarts()
