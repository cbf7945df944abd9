"""Ctrl-C once and twice, SIGTERM, and a terminal that closes: at start-up, in the middle of a
checkpoint and in the middle of training.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tianflow.rundir.checkpoints import CheckpointStore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(360)]
SLOW_TO_SAVE = {
    "algorithm__name": "tests.e2e.troubled_ppo:TroubledPPO",
    "algorithm__trouble": "slow to save",
}


def calm(live: LiveRun) -> None:
    """No traceback, and nothing that looks like an error."""
    assert "Traceback" not in live.stderr + live.stdout
    assert '"level": "error"' not in live.stderr


def saved_anew(live: LiveRun, before: list[Path]) -> bool:
    """A whole checkpoint was written; the last one holds what the run ended with."""
    new = set(live.checkpoints()) - set(before)
    return any(CheckpointStore.load(path).version.number == live.result["updates"] for path in new)


def ended_with_a_checkpoint(live: LiveRun, number: signal.Signals, before: list[Path]) -> None:
    """At one signal, with one line."""
    assert saved_anew(live, before)
    assert [] == live.staged()
    assert 1 == live.stderr.count(f"{number.name}: stopping with a last checkpoint")
    assert ("stopped", number.name) == (live.result["state"], live.result["reason"])
    assert not live.control_file.exists()
    calm(live)


@pytest.fixture
def on_a_terminal() -> Iterator[None]:
    """Whoever started these tests may ignore hangups, and what they start would, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("on_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_one_signal_amid_training_ends_it_with_a_checkpoint_and_one_line(
    tmp_path: Path, number: signal.Signals
) -> None:
    with harness.run(tmp_path) as live:
        live.until_training(more=5)
        # hosts live in sessions of their own: a hangup of the terminal, or Ctrl-C in it, reaches
        # the coordinator only
        assert {os.getsid(pid) for pid in live.descendants()}.isdisjoint(
            {os.getsid(live.process.pid)}
        )
        assert 128 + number == live.interrupt(number)
        ended_with_a_checkpoint(live, number, [])


def test_one_signal_amid_a_checkpoint_leaves_whole_ones_only(tmp_path: Path) -> None:
    with harness.run(tmp_path, **SLOW_TO_SAVE) as live:
        live.until_training(more=5)
        first = live.until_checkpoint()
        live.act("checkpoint")
        live.until("a checkpoint is being written", live.staged)
        assert 143 == live.interrupt(signal.SIGTERM)
        ended_with_a_checkpoint(live, signal.SIGTERM, [first])


@pytest.mark.parametrize(
    ("when", "number"),
    [
        ("served", signal.SIGINT),
        ("learner", signal.SIGTERM),
        ("actors-0", signal.SIGINT),
    ],
)
def test_one_signal_at_start_up_is_enough(
    tmp_path: Path, when: str, number: signal.Signals
) -> None:
    """As soon as the server answers, and as soon as there is a learner, or an actor host."""
    with harness.run(tmp_path) as live:
        live.until(
            when,
            lambda: live.control if when == "served" else live.pid(when),
            within_s=harness.START_S,
        )
        assert 128 + number == live.interrupt(number)
        assert not live.control_file.exists()
        calm(live)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_check_of_an_environment_that_does_not_come_back(
    tmp_path: Path, number: signal.Signals
) -> None:
    with harness.run(
        tmp_path, env__id="tests.e2e.troubles:NeverEnv", env__kwargs={"folder": str(tmp_path)}
    ) as live:
        live.until("the constructor", (tmp_path / "constructor").exists, within_s=harness.START_S)
        code = live.interrupt(number)
        assert code in (128 + number, -number)  # a shell makes the same of both
        calm(live)


@pytest.mark.beside
def test_a_stopped_fork_server_keeps_no_run_from_ending(tmp_path: Path) -> None:
    with harness.run(tmp_path, run__grace_s=1.0) as live:
        live.until_training(more=5)
        live.kill("tianflow-forks", signal.SIGSTOP)
        live.kill("actors-0", signal.SIGSTOP)
        assert 130 == live.interrupt()
        assert saved_anew(live, [])


@pytest.mark.beside
def test_two_signals_amid_training_end_it_at_once(tmp_path: Path) -> None:
    with harness.run(tmp_path, **SLOW_TO_SAVE) as live:
        live.until_training(more=5)
        live.process.send_signal(signal.SIGINT)
        live.until("the first is heard", lambda: "SIGINT: stopping" in live.stderr)
        assert 130 == live.interrupt(signal.SIGINT)
        assert "stopped" == live.result["state"]
        assert [] == live.checkpoints()
        assert [] == live.staged()
        calm(live)


@pytest.mark.beside
def test_two_signals_amid_a_checkpoint_keep_the_one_before(tmp_path: Path) -> None:
    with harness.run(tmp_path, **SLOW_TO_SAVE) as live:
        live.until_training(more=5)
        first = live.until_checkpoint()
        live.act("checkpoint")
        live.until("a checkpoint is being written", live.staged)
        live.process.send_signal(signal.SIGTERM)
        live.until("the first is heard", lambda: "SIGTERM: stopping" in live.stderr)
        assert 143 == live.interrupt(signal.SIGINT)
        assert [first] == live.checkpoints()
        assert [] == live.staged()
        calm(live)
