"""Real runs are held back on purpose: each cause is named within ten seconds, and who follows the
advice is held back no more.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import LiveRun, run
from tests.e2e.test_live import tianflow
from tianflow.observability.diagnosis import WINDOW_S
from tianflow.rundir.history import NAME, read_rows

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
NAMED_WITHIN_S = 10.0
UPDATE_S = 0.04
"""What an update takes: with two trajectories of 8 steps of 2 environments, the learner takes up to
800 steps a second.
"""


@pytest.fixture(name="live", scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """One actor whose environments sleep 5 ms a step, 200 steps a second; updates all take the same
    time; room for eight actors at once.
    """
    folder = tmp_path_factory.mktemp("diagnosis")
    algorithm = "tests.e2e.steady:SteadyOracle"
    settings: dict[str, object] = {
        "algorithm__record": str(folder / "record"),
        "algorithm__update_s": UPDATE_S,
        "algorithm__batch_trajectories": 2,
        "env__kwargs": {"seconds": 0.005, "jitter": False},
        "actors__count": 1,
        "actors__hosts": 8,
        "actors__rollout_steps": 8,
        "balance__min_fragment_steps": 1,
        "balance__max_staleness": 4,
        "evaluation__episodes": 1,
        "evaluation__num_envs": 1,
    }
    config = folder / "oracle.toml"
    config.write_text(
        f"[env]\nid = 'tests.support.oracle:EchoEnv'\n[algorithm]\nname = '{algorithm}'\n"
    )
    with run(
        folder / "runs",
        str(config),
        env__id="tests.support.oracle:EchoEnv",
        algorithm__epochs=None,
        algorithm__minibatch_size=None,
        **settings,
    ) as live:
        live.until("it is ready", live.ready)
        live.until_training(more=2)
        yield live


def diagnosis(live: LiveRun) -> dict[str, Any]:
    code, body = live.request(f"/api/v1/runs/{live.name}/diagnosis")
    return json.loads(body) if code == 200 else {}


def named(
    live: LiveRun, verdict: str, *, held_s: float = 2.0, since: float | None = None
) -> dict[str, Any]:
    """The diagnosis once it has been ``verdict`` for so long: what is seen in passing from one
    cause to another does not count.

    When it was first named is what the run's own history says, in Unix time as is ``since``, which
    is now by itself: how long it takes to look does not count.
    """
    since = time.time() if since is None else since

    def found() -> dict[str, Any]:
        told = diagnosis(live)
        return (
            told
            if told["verdict"] == verdict
            and told["for_s"] >= held_s
            and (told["component"] or told["window_s"] >= 5.0)
            else {}
        )

    def lines() -> list[float]:
        return [
            row["time"]
            for row in read_rows(live.directory / NAME)
            if row["time"] >= since and row["bottleneck"] == verdict
        ]

    told = live.until(f"the verdict is {verdict}", found)
    first = live.until("the history tells of it", lines)[0]
    log.info("%s after %.1f s: %s", verdict, first - since, told["advice"])
    assert first - since <= NAMED_WITHIN_S
    return told


def set_all(live: LiveRun, settings: dict[str, float]) -> None:
    for path, value in settings.items():
        section, key = path.split(".")
        live.patch(section, **{key: value})


def test_slow_environments_are_named_and_with_as_many_actors_as_advised_the_learner_waits_no_more(
    live: LiveRun,
) -> None:
    told = named(live, "sampling-bound")
    assert {"actors.count"} == set(told["suggested"])
    count = told["suggested"]["actors.count"]
    assert f"({count} instead of 1.0)" in told["advice"]
    assert 2 <= count <= 8
    assert told["forecast_steps_per_s"] > 1.5 * told["steps_per_s"]
    set_all(live, told["suggested"])
    live.until("they are all there", lambda: live.metric("actors") == count)
    waited = told["waits"]["learner"]
    live.until(
        "the learner waits half as much",
        lambda: diagnosis(live)["waits"].get("learner", 1.0) < waited / 2,
    )


def test_a_slow_learner_is_named(live: LiveRun) -> None:
    live.patch("actors", count=2)
    named(live, "sampling-bound", held_s=0.0)
    live.patch("learner", slowdown=9.0)
    told = named(live, "learning-bound")
    assert {"learner.slowdown": 0.0} == told["suggested"]
    assert 1.0 == live.metric("diagnosis", "learning-bound")

    def differ() -> float:
        return abs(diagnosis(live)["waits"]["actors"] - live.metric("waiting_ratio", "actors"))

    live.until("the metrics tell of the same wait", lambda: differ() < 0.2)
    said = tianflow(live, "diagnose", live.name).stdout
    assert f"{live.name}: learning-bound" in said
    assert f"try: tianflow set {live.name} learner.slowdown=0" in said
    live.patch("learner", slowdown=0.0)


def test_a_bound_that_is_too_tight_for_the_actors_is_named(live: LiveRun) -> None:
    """With bound 0 two of four actors work while the learner waits, and none while it works."""
    live.patch("actors", count=4)
    live.until("they are all there", lambda: live.metric("actors") == 4.0)
    assert "balance-bound" != diagnosis(live)["verdict"]
    live.patch("balance", max_staleness=0)
    told = named(live, "balance-bound")
    assert 2 == told["suggested"]["balance.max_staleness"]
    assert "4 actors are more than max_staleness * B = 0 * 2" in told["advice"]


def served(folder: Path, name: str, *, servers: int, slow: Path) -> AbstractContextManager[LiveRun]:
    """16 actors on two hosts, whose environments take 5 ms a step. A server needs 1 ms for a
    request, so one of them is enough for 400 steps a second.
    """
    config = folder / f"{name}.toml"
    config.write_text(
        "[env]\nid = 'tests.support.oracle:EchoEnv'\n"
        "[algorithm]\nname = 'tests.e2e.steady:ServedOracle'\n"
    )
    settings: dict[str, object] = {
        "env__id": "tests.support.oracle:EchoEnv",
        "env__kwargs": {"seconds": 0.005, "jitter": False},
        "env__num_envs": 1,
        "algorithm__epochs": None,
        "algorithm__minibatch_size": None,
        "algorithm__record": str(folder / f"{name}.record"),
        "algorithm__update_s": 0.01,
        "algorithm__batch_trajectories": 2,
        "algorithm__act_s": 0.001,
        "algorithm__slow": str(slow),
        "actors__count": 16,
        "actors__hosts": 2,
        "actors__inference": "central",
        "actors__rollout_steps": 16,
        "inference__servers": servers,
        "inference__device": "cpu",
        "balance__max_staleness": 32,
        "evaluation__episodes": 1,
        "evaluation__num_envs": 1,
    }
    return run(folder / name, str(config), **settings)


def test_a_server_that_becomes_slow_is_named_and_the_forecast_of_the_advice_comes_true(
    tmp_path: Path,
) -> None:
    slow = tmp_path / "slow"
    with served(tmp_path, "one", servers=1, slow=slow) as live:
        live.until_training(more=20)
        assert "inference-bound" != named(live, "sampling-bound")["verdict"]
        began = time.time()
        slow.touch()
        diagnosed = named(live, "inference-bound", since=began, held_s=WINDOW_S)
        assert {"inference.servers"} == set(diagnosed["suggested"])
        servers = int(diagnosed["suggested"]["inference.servers"])
        assert 2 <= servers <= 3
        assert diagnosed["forecast_steps_per_s"] > 1.25 * diagnosed["steps_per_s"]
    with served(tmp_path, "more", servers=servers, slow=slow) as live:
        live.until_training(more=20)
        forecast = pytest.approx(diagnosed["forecast_steps_per_s"], rel=0.2)
        # Other work on the machine may take a core for a while: a later window judges then.
        live.until(
            f"a window without a start reaches {forecast}",
            lambda: (
                (newest := diagnosis(live)).get("window_s", 0.0) >= 5.0
                and newest["for_s"] >= WINDOW_S
                and newest["steps_per_s"] == forecast
            ),
        )


def test_a_hung_environment_is_named_with_its_actor(tmp_path: Path) -> None:
    hanging = {"at": 400, "marker": str(tmp_path / "hung")}
    with run(
        tmp_path,
        env__id="tests.support.environments:HangingEnv",
        env__kwargs=hanging,
        balance__straggler_patience=2.0,
    ) as live:
        live.until("it hangs", (tmp_path / "hung").exists)
        told = named(live, "stalled", held_s=0.0, since=(tmp_path / "hung").stat().st_mtime)
        assert told["component"].startswith("actor-")
        assert "waits for a step of its environments" in told["advice"]
        states = {
            component["name"]: component["state"] for component in live.status()["components"]
        }
        assert "busy" == states[told["component"]]
