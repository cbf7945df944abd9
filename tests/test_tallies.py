"""The coordinator's small accounts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from tianflow.payloads import Episode
from tianflow.statistics import ComponentStatistics, TimeShares
from tianflow.tallies import ActiveClock, Bottleneck, EpisodeTally, Journal, waiting_seconds


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def component(name, role, **seconds):
    return ComponentStatistics(name, role, "host", TimeShares(seconds, "busy", 0.0))


def test_paused_time_does_not_count():
    clock = Clock()
    active = ActiveClock(clock)
    before = active()
    clock.now += 3
    active.pause()
    active.pause()
    clock.now += 50
    assert active() - before == 3
    active.resume()
    active.resume()
    clock.now += 2
    assert active() - before == 5


def test_the_mean_exists_once_a_hundred_episodes_have_ended():
    tally = EpisodeTally(count=7)
    tally.add([Episode(1.0, 3)] * 99)
    assert (tally.mean, tally.count) == (None, 106)
    tally.add([Episode(101.0, 3)])
    assert tally.mean == 2.0
    tally.add([Episode(2.0, 3)] * 100)
    assert tally.mean == 2.0


def test_the_audit_is_kept_in_memory_and_appended_to_the_file(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        journal = Journal(path=tmp_path / "audit.jsonl", executor=executor)
        journal.add("cli", "pause")
        journal.add("http:::1", "change", old={"a": 1}, new={"a": 2})
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert lines == journal.records
    assert [(line["source"], line["action"]) for line in lines] == [("cli", "pause"), ("http:::1", "change")]


def test_waiting_is_summed_over_actors_and_kept_apart_from_the_learner():
    components = [
        component("learner", "learner", **{"waiting:batch": 5.0, "waiting:grant": 100.0}),
        component("actor-0", "actor", **{"waiting:grant": 2.0}),
        component("actor-1", "actor", **{"waiting:grant": 3.0, "waiting:turn": 100.0}),
    ]
    assert waiting_seconds(components, 0.0) == (5.0, 5.0)


def named(learner, actor, *, spent=False):
    """The verdict after ten seconds in which the learner and the one actor waited so long."""
    bottleneck = Bottleneck()
    bottleneck.name([component("learner", "learner"), component("actor-0", "actor")], 0.0, credits_spent=spent)
    after = [component("learner", "learner", **{"waiting:batch": learner}), component("actor-0", "actor", **{"waiting:grant": actor})]
    return bottleneck.name(after, 10.0, credits_spent=spent)


def test_who_waits_names_the_bottleneck():
    assert named(5.0, 0.0) == "sampling-bound"
    assert named(0.0, 5.0) == "learning-bound"
    assert named(0.5, 0.5) == "balanced"
    assert named(5.0, 5.0) == "transport-bound"
    assert named(5.0, 5.0, spent=True) == "balance-bound"


def named_with_replay(learner, actor, *, draws, inserts, spent=True):
    """The same with a limiter that held back draws and inserts for so long."""
    bottleneck = Bottleneck()
    before = {"draw": 7.0, "insert": 7.0}
    bottleneck.name([component("learner", "learner"), component("actor-0", "actor")], 0.0, credits_spent=spent, blocked=before)
    after = [component("learner", "learner", **{"waiting:batch": learner}), component("actor-0", "actor", **{"waiting:grant": actor})]
    held = {"draw": 7.0 + draws, "insert": 7.0 + inserts}
    return bottleneck.name(after, 10.0, credits_spent=spent, blocked=held)


def test_with_replay_whom_the_limiter_holds_back_names_the_bottleneck():
    assert named_with_replay(5.0, 0.0, draws=5.0, inserts=0.0) == "sampling-bound"
    assert named_with_replay(0.0, 5.0, draws=0.0, inserts=5.0) == "learning-bound"
    assert named_with_replay(5.0, 5.0, draws=5.0, inserts=0.0) == "sampling-bound"
    assert named_with_replay(5.0, 5.0, draws=0.0, inserts=5.0) == "learning-bound"
    assert named_with_replay(5.0, 5.0, draws=5.0, inserts=5.0) == "balance-bound"


def test_with_replay_who_waits_without_being_held_back_waits_for_shards():
    assert named_with_replay(5.0, 0.0, draws=0.5, inserts=0.5) == "transport-bound"
    assert named_with_replay(0.0, 5.0, draws=0.5, inserts=0.5) == "transport-bound"
    assert named_with_replay(5.0, 5.0, draws=0.5, inserts=0.5) == "transport-bound"


def test_a_side_that_is_held_back_without_waiting_loses_nothing():
    assert named_with_replay(0.5, 0.5, draws=9.0, inserts=9.0) == "balanced"


def test_a_learner_that_waits_for_its_first_draw_waits_for_sampling_and_is_not_starting():
    assert named_with_replay(10.0, 0.0, draws=10.0, inserts=0.0) == "sampling-bound"


def test_before_there_is_anything_to_compare_it_is_starting():
    assert Bottleneck().name([component("actor-0", "actor")], 0.0, credits_spent=False) == "starting"
