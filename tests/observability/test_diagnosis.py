"""Verdicts and advice from constructed statistics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.fakes_run import FakeReplay, FakeRun, make_config
from tianflow.config.loading import with_changes
from tianflow.config.model import Config
from tianflow.core.limits import RateLimits
from tianflow.core.statistics import (
    VERDICTS,
    ComponentStatistics,
    Diagnosis,
    HistogramBuilder,
    ReplayStatistics,
    RunStatistics,
    TimeShares,
)
from tianflow.observability import diagnosis
from tianflow.observability.diagnosis import DiagnosisWindow, diagnose
from tianflow.observability.window import time_between
from tianflow.replay.rate_limiter import Limiter

WINDOW_S = 10.0
STEPS = 1000.0
"""Environment steps a second that every constructed run makes."""


def configured(**sections: dict[str, object]) -> Config:
    """B = 2, bound 8, room for 64 actors."""
    return with_changes(
        make_config().model_copy(
            update={"actors": make_config().actors.model_copy(update={"hosts": 64})}
        ),
        {"balance": {"max_staleness": 8}, **sections},
    )


def component(
    name: str,
    states: dict[str, float],
    *,
    at: float,
    usual: float | None = 0.1,
    since: float | None = None,
) -> ComponentStatistics:
    """Has spent ``states`` when the time is ``at``; the last of them is the one that is going on,
    since ``since``.
    """
    role = name.partition("-")[0]
    rollouts = HistogramBuilder()
    if usual is not None:
        rollouts.add(usual)
    timing = {"actor": "rollout_seconds", "learner": "update_seconds"}[role]
    current = list(states)[-1]
    return ComponentStatistics(
        name,
        role,
        f"host of {name}",
        TimeShares(states, current, at if since is None else since),
        distributions={timing: rollouts.read()},
    )


def look(
    now: float,
    components: list[ComponentStatistics],
    *,
    replay: FakeReplay | None = None,
    **ledger: Any,
) -> RunStatistics:
    fake = FakeRun()
    fake.now = now
    run = fake.statistics()
    shown = {
        "updates": int(now),
        "in_use": 4,
        "credits_limit": 64,
        "queue": 0,
        "max_staleness": 8,
    } | ledger
    return replace(
        run,
        components=tuple(components),
        env_steps=int(STEPS * now),
        ledger=replace(run.ledger, **shown),
        actors_wanted=len(components) - 1,
        replay=None if replay is None else replay.statistics(now),
    )


def looks(
    learner: float,
    actors: float,
    *,
    count: int = 4,
    turn: float = 0.0,
    replay: FakeReplay | None = None,
    **ledger: Any,
) -> list[RunStatistics]:
    """Two looks, ``WINDOW_S`` apart, between which learner and actors wait for such shares; before
    the first they did the opposite.
    """

    def at(now: float, parts: list[tuple[float, float, float]]) -> RunStatistics:
        """``parts``: seconds, and shares of them for which learner and actors waited."""
        waited = [
            sum(seconds * part for seconds, part, _ in parts),
            sum(seconds * part for seconds, _, part in parts),
        ]
        total = sum(seconds for seconds, _, _ in parts)
        turns = turn * total
        names = [("learner", {"waiting:batch": waited[0], "busy": total - waited[0]})]
        names += [
            (
                f"actor-{i}",
                {
                    "waiting:grant": waited[1],
                    "waiting:turn": turns,
                    "busy": total - waited[1] - turns,
                },
            )
            for i in range(count)
        ]
        return look(
            now,
            [component(name, states, at=now) for name, states in names],
            replay=replay,
            **ledger,
        )

    opposite = (100.0, 0.9 if learner < 0.5 else 0.0, 0.9 - turn if actors < 0.5 else 0.0)
    return [at(100.0, [opposite]), at(100.0 + WINDOW_S, [opposite, (WINDOW_S, learner, actors)])]


# Verdicts
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learner", "actors", "ledger", "expected"),
    [
        (0.5, 0.0, {}, "sampling-bound"),
        (0.0, 0.5, {}, "learning-bound"),
        (0.1, 0.1, {}, "balanced"),
        (0.5, 0.5, {"in_use": 4, "credits_limit": 64}, "transport-bound"),
        (0.5, 0.5, {"in_use": 4, "credits_limit": 4}, "balance-bound"),
        (0.5, 0.5, {"in_use": 12, "credits_limit": 12}, "transport-bound"),
        (0.5, 0.5, {"in_use": 12, "credits_limit": 12, "queue": 8}, "balance-bound"),
    ],
)
def test_who_waited_lately_names_what_holds_the_run_back(
    learner: float, actors: float, ledger: dict[str, Any], expected: str
) -> None:
    found = diagnose(looks(learner, actors, **ledger), configured())
    assert expected == found.verdict
    assert {"learner": pytest.approx(learner), "actors": pytest.approx(actors)} == found.waits
    assert f"waits {learner:.0%} of the time, actors {actors:.0%}" in found.advice
    assert (WINDOW_S, STEPS) == (found.window_s, found.steps_per_s)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({}, None),
        ({"near": {}, "far": {"round_trip_s": 0.4, "weights_lag": 3}}, "node far has the slowest"),
        ({"near": {"up": False}, "far": {"round_trip_s": 0.4}}, "node near is not connected"),
    ],
)
def test_the_node_with_the_slowest_connection_is_named(
    nodes: dict[str, dict[str, Any]], expected: str | None
) -> None:
    samples = looks(0.5, 0.5, in_use=12, credits_limit=12)
    (usual,) = FakeRun().statistics().nodes.values()
    samples[-1] = replace(
        samples[-1], nodes={name: replace(usual, **changed) for name, changed in nodes.items()}
    )
    advice = diagnose(samples, configured()).advice
    assert "node " not in advice if expected is None else expected in advice


def test_the_nodes_of_shards_are_named_with_what_their_links_carry() -> None:
    replay = FakeReplay()
    replay.held_back = "insert"
    samples = looks(0.5, 0.0, replay=replay)
    (usual,) = FakeRun().statistics().nodes.values()
    before = replace(
        usual, received_bytes={"draws": 1000}, sent_bytes={}, direct_received_bytes=500
    )
    after = replace(
        before,
        received_bytes={"draws": 1000 + int(2000 * WINDOW_S)},
        sent_bytes={"priorities": int(30 * WINDOW_S)},
        direct_received_bytes=500 + int(4000 * WINDOW_S),
        shards=("replay-0", "replay-1"),
    )
    other = replace(usual, shards=())
    samples[0] = replace(samples[0], nodes={"store": before})
    samples[1] = replace(samples[1], nodes={"store": after, "far": other})
    found = diagnose(samples, configured())
    assert "transport-bound" == found.verdict
    assert "they wait for 2 replay shards; node store has replay-0, replay-1 (" in found.advice
    for carried in ("2,000 bytes/s to the head", "30 from it", "4,000 from other nodes"):
        assert carried in found.advice
    assert "node far" not in found.advice
    samples[1] = replace(samples[1], nodes={})
    assert "node " not in diagnose(samples, configured()).advice


def far_looks(
    *, waits: float, late: bool = False, seconds: float = 0.1, **ledger: Any
) -> list[RunStatistics]:
    """Eight actors near, which do not wait, and one far, which does; the learner waits, too. A
    trajectory of the far one takes ``seconds``, of others 0.1.
    """

    def at(now: float) -> RunStatistics:
        shares = {"learner": ("waiting:batch", 0.5), **{f"actor-{i}": ("", 0.0) for i in range(8)}}
        shares["actor-8"] = "waiting:grant", waits
        found = [
            component(name, {state: now * share, "busy": now * (1.0 - share)}, at=now)
            for name, (state, share) in shares.items()
        ]
        for place, one in enumerate(found[1:], start=1):
            taken = HistogramBuilder()
            taken.add(seconds if one.name == "actor-8" else 0.1)
            found[place] = replace(
                one, distributions={**one.distributions, "trajectory_seconds": taken.read()}
            )
        seen = look(now, found, **ledger)
        (usual,) = seen.nodes.values()
        near = replace(usual, actors=tuple(f"actor-{i}" for i in range(8)), round_trip_s=0.9)
        far = replace(usual, actors=("actor-8",), late=("actor-8",) if late else ())
        return replace(seen, nodes={"near": near, "far": far})

    return [at(100.0), at(100.0 + WINDOW_S)]


SPENT = {"in_use": 12, "credits_limit": 12, "queue": 4}


@pytest.mark.parametrize(
    ("waits", "given", "expected"),
    [
        (0.1, {}, "sampling-bound"),
        (0.8, {}, "transport-bound"),
        (0.8, {**SPENT}, "sampling-bound"),
        (0.8, {**SPENT, "late": True}, "transport-bound"),
        (0.8, {**SPENT, "late": True, "seconds": 0.19}, "transport-bound"),
        (0.8, {**SPENT, "late": True, "seconds": 0.21}, "sampling-bound"),
        (0.1, {**SPENT, "late": True}, "sampling-bound"),
    ],
)
def test_a_node_whose_actors_wait_for_its_link_is_named(
    waits: float, given: dict[str, Any], expected: str
) -> None:
    """Among many others, too. Actors wait for the link if credits are free, or if they rest because
    they were late and not because their environments are slow.
    """
    found = diagnose(far_looks(waits=waits, **given), configured())
    assert expected == found.verdict
    if expected == "transport-bound":
        assert "node far has the slowest connection" in found.advice
        assert "its actors wait 80% of the time" in found.advice
        assert ("1 of its 1 actors rest" in found.advice) == bool(given.get("late"))


@pytest.mark.parametrize(
    ("learner", "actors", "side", "expected"),
    [
        (0.5, 0.0, "draw", "sampling-bound"),
        (0.5, 0.5, "draw", "sampling-bound"),
        (0.0, 0.5, "insert", "learning-bound"),
        (0.5, 0.5, "insert", "learning-bound"),
        (0.0, 0.5, "draw", "transport-bound"),
        (0.5, 0.0, "insert", "transport-bound"),
        (0.05, 0.05, "draw", "balanced"),
    ],
)
def test_with_replay_the_limiter_has_a_say(
    learner: float, actors: float, side: str, expected: str
) -> None:
    replay = FakeReplay()
    replay.held_back = side
    assert expected == diagnose(looks(learner, actors, replay=replay), configured()).verdict


def test_before_there_is_anything_to_compare_it_is_starting() -> None:
    _, run = looks(0.5, 0.0)
    assert "starting" == diagnose([run], configured()).verdict


def test_a_run_that_does_not_train_has_its_state_for_a_verdict() -> None:
    before, run = looks(0.5, 0.0)
    assert "paused" == diagnose([before, replace(run, state="paused")], configured()).verdict


def test_pauses_and_starts_are_no_part_of_the_shares() -> None:
    names = ("learner", "actor-0")
    before = look(
        100.0, [component(name, {"starting": 1.0, "busy": 50.0}, at=100.0) for name in names]
    )
    after = look(
        110.0,
        [
            component(
                name, {"starting": 1.0, "paused": 6.0, "waiting:batch": 2.0, "busy": 52.0}, at=110.0
            )
            for name in names
        ],
    )
    assert {"learner": 0.5, "actors": 0.0} == diagnose([before, after], configured()).waits


# Advice
# --------------------------------------------------------------------------------------------------


def test_the_sentence_says_by_how_much_in_the_numbers_of_the_shares() -> None:
    found = diagnose(looks(0.41, 0.0), configured())
    assert "the learner waits 41% of the time" in found.advice
    assert "about 1.7x the actors" in found.advice
    assert "(7 instead of 4.0)" in found.advice
    assert "at about 1,695 steps/s instead of 1,000" in found.advice
    assert {"actors.count": 7} == found.suggested


@pytest.mark.parametrize(
    ("learner", "actors", "count", "expected", "forecast"),
    [
        (0.5, 0.0, 4, 8, 2000.0),
        (0.75, 0.0, 1, 4, 4000.0),
        (0.5, 0.1, 10, 18, 2000.0),  # 9 step at once
        (0.2, 0.0, 1, 2, 1250.0),  # not 2000: the learner takes no more
        (
            1.0,
            0.0,
            1,
            34,
            1000.0 / 0.03,
        ),  # a learner that only waits is no reason for infinitely many
    ],
)
def test_the_number_of_actors_follows_from_who_waits(
    learner: float, actors: float, count: int, expected: int, forecast: float
) -> None:
    found = diagnose(looks(learner, actors, count=count, max_staleness=32), configured())
    assert {"actors.count": expected} == found.suggested
    assert pytest.approx(forecast) == found.forecast_steps_per_s


def test_the_wait_for_the_first_batch_of_all_forecasts_nothing() -> None:
    """Until there is more than a moment of training: then, waiting for that batch is all that is
    known.
    """
    first, last = looks(0.5, 0.0)
    earlier = look(
        first.now - 5.0,
        [replace(part, time=TimeShares({"busy": 0.0}, "busy", 0.0)) for part in first.components],
        updates=0,
    )
    assert diagnose([first, last], configured()) == diagnose([earlier, first, last], configured())
    waiting = [
        replace(each, ledger=replace(each.ledger, updates=updates))
        for each, updates in ((first, 0), (last, 1))
    ]
    assert "sampling-bound" == diagnose(waiting, configured()).verdict


def test_more_actors_than_the_bound_lets_work_come_with_a_wider_bound() -> None:
    found = diagnose(looks(0.5, 0.0, max_staleness=1), configured())
    assert {"actors.count": 8, "balance.max_staleness": 4} == found.suggested
    assert (
        "max_staleness = 1 would keep some idle, 4 would not; neither would batch_trajectories = 8, "
        "with the same staleness" in found.advice
    )
    assert (
        "batch_trajectories" not in diagnose(looks(0.5, 0.0, max_staleness=0), configured()).advice
    )


def test_actors_that_take_turns_need_hosts_and_not_actors() -> None:
    config = configured()
    config = config.model_copy(update={"actors": config.actors.model_copy(update={"hosts": 2})})
    found = diagnose(looks(0.5, 0.0, count=8, turn=0.75), config)
    assert {"actors.hosts": 4} == found.suggested
    assert "actors.hosts = 4, in a new run" in found.advice


def test_a_slow_learner_needs_fewer_actors() -> None:
    found = diagnose(looks(0.0, 0.5), configured())
    assert {"actors.count": 2} == found.suggested
    assert "up to 2.0x the steps" in found.advice
    assert "2 of 4 actors would feed this one as well" in found.advice
    assert STEPS == found.forecast_steps_per_s


def test_actors_that_take_turns_make_no_more_than_their_hosts_however_long_each_waits() -> None:
    config = configured()
    config = config.model_copy(update={"actors": config.actors.model_copy(update={"hosts": 1})})
    found = diagnose(looks(0.0, 0.75, count=16, turn=0.2), config)  # 0.8 of the host is in use
    assert "up to 1.2x the steps" in found.advice


def test_a_learner_that_is_slowed_down_on_purpose_is_told_of() -> None:
    found = diagnose(looks(0.0, 0.75), configured(learner={"slowdown": 2.0}))
    assert {"learner.slowdown": 0.0} == found.suggested
    assert "makes each update 3x as long: without it about 3,000 steps/s" in found.advice
    assert pytest.approx(3000.0) == found.forecast_steps_per_s


def test_a_bound_that_is_too_tight_is_widened_to_what_the_actors_need() -> None:
    spent: dict[str, Any] = {"in_use": 4, "credits_limit": 4}
    found = diagnose(looks(0.5, 0.5, count=9, max_staleness=1, **spent), configured())
    assert {"balance.max_staleness": 5} == found.suggested
    assert "9 actors are more than max_staleness * B = 1 * 2 allows" in found.advice
    assert (
        "about 2,000 steps/s instead of 1,000 with max_staleness = 5, at the price of staler data"
        in found.advice
    )
    assert "with actors.count = 2 the bound would keep no actor idle" in found.advice
    assert {"balance.credits": 6} == diagnose(
        looks(0.5, 0.5, **spent), configured(balance={"credits": 4})
    ).suggested


UNLIMITED = RateLimits(1.0, 64, -math.inf, math.inf, 1000, insert_size=32, draw_size=64)


class Blocked(FakeReplay):
    """Both sides are blocked for a share of the time, under other limits."""

    def __init__(self, limits: RateLimits, share: float) -> None:
        super().__init__()
        self.limiter, self.share = Limiter(limits=limits), share

    def statistics(self, seconds: float) -> ReplayStatistics:
        blocked = dict.fromkeys(("insert", "draw"), self.share * seconds)
        return replace(super().statistics(seconds), blocked_s=blocked)


def test_without_a_ratio_both_sides_are_blocked_by_missing_shards_and_not_by_the_limiter() -> None:
    found = diagnose(looks(0.5, 0.5, replay=Blocked(UNLIMITED, 0.5)), configured())
    assert "balance-bound" == found.verdict
    assert "replay shards are missing or have too few items (0 items in 2 shards" in found.advice
    assert {} == found.suggested
    assert found.forecast_steps_per_s is None


@given(
    learner=st.floats(0.0, 1.0),
    actors=st.floats(0.0, 1.0),
    count=st.integers(1, 5),
    blocked=st.floats(0.0, 1.0),
    limits=st.sampled_from([None, UNLIMITED, FakeReplay().limiter.limits]),
    ledger=st.fixed_dictionaries(
        {
            "max_staleness": st.sampled_from([None, 0, 1, 8]),
            "in_use": st.integers(0, 64),
            "queue": st.integers(0, 64),
            "credits_limit": st.integers(1, 64),
            "updates": st.sampled_from([0, 7]),
        }
    ),
    slowdown=st.sampled_from([0.0, 2.0]),
)
@examples(50)
def test_no_statistics_make_the_diagnosis_fail(
    *,
    learner: float,
    actors: float,
    count: int,
    blocked: float,
    limits: RateLimits | None,
    ledger: dict[str, Any],
    slowdown: float,
) -> None:
    replay = None if limits is None else Blocked(limits, blocked)
    samples = looks(learner, actors, count=count, replay=replay, **ledger)
    found = diagnose(samples, configured(learner={"slowdown": slowdown}))
    assert found.verdict in VERDICTS
    assert all(math.isfinite(value) for value in found.suggested.values())


def test_a_diagnosis_that_fails_costs_nothing_else_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, run = looks(0.5, 0.5)
    window = DiagnosisWindow()
    window.diagnosed(before, configured())
    with monkeypatch.context() as broken:
        broken.setattr(diagnosis, "diagnose", lambda *_: round(math.inf))
        for _ in range(3):
            found = window.diagnosed(run, configured())
    assert "unknown" == found.diagnosis.verdict
    assert "OverflowError" in found.diagnosis.advice
    assert run == replace(found, diagnosis=run.diagnosis)
    assert 1 == caplog.text.count("the diagnosis of the run failed")
    assert "unknown" != window.diagnosed(run, configured()).diagnosis.verdict


def test_with_room_for_all_the_slowest_is_named() -> None:
    before, run = looks(0.5, 0.5, in_use=4, credits_limit=4)
    learner, *actors, last = run.components
    slow = component(last.name, dict(last.time.seconds), at=run.now, usual=0.5)
    found = diagnose([before, replace(run, components=(learner, *actors, slow))], configured())
    assert "balance-bound" == found.verdict
    assert (
        "the others wait for the slowest, actor-3 with 0.5 s a trajectory (0.2 s on average)"
        in found.advice
    )
    assert {"balance.max_staleness": 9} == found.suggested


def test_of_one_actor_none_is_the_slowest() -> None:
    found = diagnose(looks(0.5, 0.5, count=1, in_use=1, credits_limit=1), configured())
    assert "balance-bound" == found.verdict
    assert (
        "the learner waits 50% of the time, actors 50%: in turn; without waiting about"
        in found.advice
    )


# Standing still
# --------------------------------------------------------------------------------------------------


def standing(
    name: str, lasted: float, *, usual: float | None = 0.1, state: str = "busy", updates: int = 110
) -> Diagnosis:
    """The diagnosis when ``name`` has been in ``state`` for ``lasted`` seconds, and there were
    ``updates`` of late.
    """
    before, run = looks(0.0, 0.0)
    changed = tuple(
        component(c.name, {state: 50.0}, at=run.now, usual=usual, since=run.now - lasted)
        if c.name == name
        else c
        for c in run.components
    )
    return diagnose(
        [before, replace(run, components=changed, ledger=replace(run.ledger, updates=updates))],
        configured(),
    )


def test_a_hung_environment_is_named_with_its_actor() -> None:
    found = standing("actor-2", 4.2)
    assert ("stalled", "actor-2") == (found.verdict, found.component)
    assert pytest.approx(4.2) == found.for_s
    assert (
        "waits for a step of its environments: it has been in one trajectory for 4 s "
        "(usually 0.1 s); the other actors work" in found.advice
    )
    assert "env.step_timeout_s = 60 s" in found.advice
    assert "no update for 10 s" in standing("actor-2", 4.2, updates=100).advice


@pytest.mark.parametrize(
    ("lasted", "usual"),
    [(2.9, 0.1), (4.0, 1.0)],  # nobody is stuck that soon; nor within five times what is usual
)
def test_a_long_trajectory_is_not_a_hung_one(lasted: float, usual: float) -> None:
    assert "balanced" == standing("actor-2", lasted, usual=usual).verdict


def test_a_first_trajectory_is_judged_by_those_of_the_others() -> None:
    assert "stalled" == standing("actor-2", 4.0, usual=None).verdict


def test_a_learner_that_does_not_end_its_update_is_named() -> None:
    found = standing("learner", 8.0, updates=100)
    assert ("stalled", "learner") == (found.verdict, found.component)
    assert "at one update for 8 s (usually 0.1 s)" in found.advice
    assert "balanced" == standing("learner", 8.0, usual=None, updates=100).verdict
    assert "stalled" == standing("learner", 31.0, usual=None, updates=100).verdict


def test_a_lost_learner_and_a_silent_host_are_named() -> None:
    before, run = looks(0.0, 0.0)
    lost = replace(
        run,
        ready=False,
        reasons=("the learner is gone and not yet back",),
        components=run.components[1:],
    )
    found = diagnose([before, lost], configured())
    assert ("stalled", "learner", "the learner is gone and not yet back") == (
        found.verdict,
        found.component,
        found.advice,
    )
    silent = replace(run, ready=False, reasons=("host 'host of actor-1' has said nothing for 5 s",))
    assert "actor-1" == diagnose([before, silent], configured()).component


def test_a_run_without_actors_is_told_to_have_one() -> None:
    before, run = looks(0.0, 0.0, count=0)
    nobody = replace(run, ready=False, reasons=("there are no actors: actors.count is 0",))
    found = diagnose([before, nobody], configured())
    assert ("stalled", "actors", {"actors.count": 1}) == (
        found.verdict,
        found.component,
        found.suggested,
    )


def test_all_waiting_for_each_other_is_a_standstill() -> None:
    def waiting(lasted: float) -> Diagnosis:
        before, run = looks(0.0, 0.0)
        states = {"learner": "waiting:batch", "actor": "waiting:grant"}
        components = tuple(
            component(c.name, {states[c.role]: 50.0}, at=run.now, since=run.now - lasted)
            for c in run.components
        )
        return diagnose(
            [
                before,
                replace(
                    run, components=components, ledger=replace(run.ledger, updates=100, in_use=3)
                ),
            ],
            configured(),
        )

    assert ("stalled", "learner") == (waiting(6.0).verdict, waiting(6.0).component)
    assert "for 6 s: 3 of 64 credits are in use" in waiting(6.0).advice
    assert "stalled" != waiting(1.0).verdict


# Time and the window
# --------------------------------------------------------------------------------------------------


def test_states_that_have_ended_count_where_they_cover_the_time() -> None:
    """Both reports are 0.9 s old; what went on when they were made did not last until now."""
    before = TimeShares({"busy": 3.0, "waiting:batch": 3.0}, "waiting:batch", 99.1)
    after = TimeShares({"busy": 8.0, "waiting:batch": 8.0}, "waiting:batch", 109.1)
    assert {"busy": 5.0, "waiting:batch": 5.0} == time_between(before, after, 100.0, 110.0)


def test_a_state_that_lasts_counts_until_now() -> None:
    before, after = (
        TimeShares({"busy": 3.0}, "waiting:batch", 98.0),
        TimeShares({"busy": 3.0}, "waiting:batch", 98.0),
    )
    assert {"busy": 0.0, "waiting:batch": 10.0} == time_between(before, after, 100.0, 110.0)
    late = TimeShares({"busy": 3.0, "waiting:batch": 507.0}, "busy", 105.0)
    since_long = TimeShares({"busy": 3.0}, "waiting:batch", -402.0)
    assert {"busy": 5.0, "waiting:batch": 5.0} == time_between(since_long, late, 100.0, 110.0)


def test_a_restarted_component_counts_from_its_own_start() -> None:
    before, after = (
        TimeShares({"waiting:grant": 500.0}, "busy", 100.0),
        TimeShares({"waiting:grant": 6.0}, "busy", 110.0),
    )
    assert {"waiting:grant": 6.0} == time_between(before, after, 100.0, 110.0)


def test_the_watch_forgets_what_is_old_and_what_was_before_a_pause() -> None:
    watch, config = DiagnosisWindow(), configured()

    def at(now: float, waited: float, state: str = "running") -> Diagnosis:
        components = [
            component("learner", {"waiting:batch": waited, "busy": now - waited}, at=now),
            component("actor-0", {"busy": now}, at=now),
        ]
        return watch.diagnosed(replace(look(now, components), state=state), config).diagnosis

    assert "starting" == at(100.0, 0.0).verdict
    assert "sampling-bound" == at(106.0, 6.0).verdict
    for second in range(7, 13):
        found = at(100.0 + second, 6.0)
    assert ("balanced", 0.0) == (found.verdict, found.waits["learner"])
    assert 5.0 == found.window_s
    assert at(113.0, 6.0).for_s > found.for_s
    assert "paused" == at(114.0, 6.0, "paused").verdict
    assert "starting" == at(115.0, 6.0).verdict


# Central inference
# --------------------------------------------------------------------------------------------------


def served(*, waits: float, busy: float, count: int, hosts: int) -> Diagnosis:
    """The diagnosis of ``count`` actors on ``hosts`` hosts that wait for servers for a share
    ``waits`` of their time, while the servers compute for a share ``busy``.
    """

    def at(now: float) -> RunStatistics:
        seconds = now - 100.0
        learner = {"busy": 0.2 * seconds, "waiting:batch": 0.8 * seconds}
        actor = {"busy": (1.0 - waits) * seconds, "waiting:inference": waits * seconds}
        server = {"busy": busy * seconds, "waiting:requests": (1.0 - busy) * seconds}
        parts = [component("learner", learner, at=now)]
        parts += [component(f"actor-{index}", actor, at=now) for index in range(count)]
        parts.append(
            ComponentStatistics(
                "inference-0",
                "inference",
                "inference-0",
                TimeShares(server, "waiting:requests", now),
            )
        )
        return look(now, parts)

    config = configured().model_copy(
        update={
            "actors": configured().actors.model_copy(
                update={"hosts": hosts, "inference": "central", "count": count}
            )
        }
    )
    return diagnose([at(101.0), at(101.0 + WINDOW_S)], config)


def test_hosts_that_are_idle_for_busy_servers_need_more_servers() -> None:
    found = served(waits=0.75, busy=0.9, count=4, hosts=4)
    assert "inference-bound" == found.verdict
    # hosts step for a quarter of the time: four times the steps need 4 * 0.9 servers
    assert {"inference.servers": 4} == found.suggested
    assert found.forecast_steps_per_s == pytest.approx(4.0 * STEPS)


def test_hosts_that_are_idle_for_idle_servers_need_more_actors() -> None:
    found = served(waits=0.75, busy=0.1, count=4, hosts=4)
    assert "inference-bound" == found.verdict
    assert 16 == found.suggested["actors.count"]
    assert "their hosts are idle" in found.advice


def test_hosts_that_step_while_actors_wait_are_not_held_up_by_inference() -> None:
    found = served(waits=0.75, busy=0.9, count=4, hosts=1)
    assert "sampling-bound" == found.verdict
