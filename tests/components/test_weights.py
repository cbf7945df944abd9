"""Publishing of versions, and consistent label and tensors of a policy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.paths import cases
from tests.support.settings import cartpole
from tianflow.channels.memory import MemoryWeights
from tianflow.components.weights import PolicyWeights, WeightPublisher, diverged, publish_due
from tianflow.config.rules import largest_publish_lag
from tianflow.core.payloads import NO_VERSION, Version, credits_ceiling

CASES = cases("estimators")
BASE = cartpole()


def flat(number: int) -> NDArray[np.uint8]:
    return np.full(4, number, np.int64).view(np.uint8)


class Holder:
    """A policy whose tensors contain their version."""

    nbytes = 32

    def __init__(self) -> None:
        self.holds = -1
        self.loads = 0
        self.broken = False

    def load(self, weights: NDArray[np.uint8]) -> None:
        if self.broken:
            raise ValueError("does not fit")
        assert 1 == len(set(weights.view(np.int64).tolist()))
        self.holds = int(weights.view(np.int64)[0])
        self.loads += 1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"weights have no use for {name}")


def opened() -> tuple[MemoryWeights, Holder, PolicyWeights]:
    channel, holder = MemoryWeights(), Holder()
    return channel, holder, PolicyWeights(reader=channel, policy=holder, nbytes=holder.nbytes)


# Publishing
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "published", "interval", "bound", "due"),
    [
        (1, 0, 1, 5, True),
        (1, 1, 1, 5, False),
        (3, 0, 4, 5, False),
        (4, 0, 4, 5, True),
        (3, 0, 4, 2, True),
        (2, 0, 4, 2, False),
        (1, 0, 4, 0, True),
        (3, 0, 4, None, False),
        (4, 0, 4, None, True),
    ],
)
def test_a_version_is_due_every_interval_or_sooner_if_the_bound_requires_it(
    version: int, published: int, interval: int, bound: int | None, due: bool
) -> None:
    assert due == publish_due(version=version, published=published, interval=interval, bound=bound)


@pytest.mark.parametrize(
    ("version", "interval", "bound", "moved", "due"),
    [
        (1, 1, 5, True, True),
        (1, 1, 5, False, False),
        (5, 1, 5, False, False),
        (6, 1, 5, False, True),
        (2, 3, 5, True, False),
        (3, 3, 5, True, True),
        (1, 1, 0, False, True),
        (900, 1, None, False, False),
    ],
)
def test_a_version_whose_policy_has_not_moved_is_due_only_if_the_bound_requires_it(
    version: int, interval: int, bound: int | None, moved: bool, due: bool
) -> None:
    assert due == publish_due(
        version=version, published=0, interval=interval, bound=bound, moved=moved
    )


@pytest.mark.parametrize(
    ("expected", "nats", "threshold"),
    [
        (False, 0.0, 0.0),
        (True, 1e-12, 0.0),
        (False, 0.01, 0.01),
        (True, 0.011, 0.01),
        (False, 1e9, math.inf),
        (True, math.nan, 0.01),
        (True, math.inf, 0.01),
    ],
)
def test_a_policy_has_moved_if_its_divergence_exceeds_the_threshold_or_is_unknown(
    expected: bool, nats: float, threshold: float
) -> None:
    assert expected == diverged(nats, threshold)


def test_the_handed_decision_is_about_the_mean_over_states() -> None:
    expected = CASES["aaps_kl_mean_and_sum_4_envs"]["expected"]
    decision = expected["decision_at_threshold_0_05"]
    assert decision["mean"] == diverged(expected["kl_mean"], 0.05)
    assert decision["sum"] == diverged(expected["kl_sum_as_in_ClusterEnv_code"], 0.05)


@given(
    moves=st.lists(st.floats(0.0, 1.0), min_size=40, max_size=40),
    threshold=st.floats(0.0, 30.0),
    bound=st.integers(0, 20),
    batch=st.integers(1, 6),
    actors=st.integers(0, 12),
    credit_limit=st.none() | st.integers(0, 30),
    interval=st.integers(1, 5),
)
def test_under_every_threshold_the_lag_leaves_credits_for_a_batch_and_the_actors(
    *,
    moves: list[float],
    threshold: float,
    bound: int,
    batch: int,
    actors: int,
    credit_limit: int | None,
    interval: int,
) -> None:
    settings = BASE.model_copy(
        update={
            "algorithm": BASE.algorithm.model_copy(update={"batch_trajectories": batch}),
            "actors": BASE.actors.model_copy(update={"count": actors}),
            "weights": BASE.weights.model_copy(update={"publish": "divergence"}),
            "balance": BASE.balance.model_copy(
                update={"credits": None if credit_limit is None else batch + credit_limit}
            ),
        }
    )
    limit = settings.balance.credits
    published, since = 0, 0.0
    for version, move in enumerate(moves, 1):
        since += move
        due = publish_due(
            version=version,
            published=published,
            interval=interval,
            bound=largest_publish_lag(settings, bound),
            moved=diverged(since, threshold),
        )
        if due:
            published, since = version, 0.0
        lag = version - published
        ceilings = [
            min(credits_ceiling(bound, publish_lag=lag_, batch=batch), limit or 10**9)
            for lag_ in (0, lag)
        ]
        assert lag <= bound
        assert ceilings[1] >= min(ceilings[0], batch + actors)
        assert ceilings[1] >= batch


@given(bound=st.integers(0, 20), interval=st.integers(1, 50))
def test_the_lag_never_exceeds_the_bound_so_one_batch_of_credits_is_never_too_stale(
    bound: int, interval: int
) -> None:
    published = 0
    for version in range(1, 100):
        if publish_due(version=version, published=published, interval=interval, bound=bound):
            published = version
        assert version - published <= bound
        assert version - published < interval


def test_offered_versions_are_published_or_skipped_and_counted() -> None:
    channel = MemoryWeights()
    publisher = WeightPublisher(writer=channel)
    assert NO_VERSION == publisher.version
    publisher.publish(Version(1, 0), flat(0))
    answers = [
        publisher.offer(Version(1, number), None if number % 3 else flat(number))
        for number in range(1, 7)
    ]
    assert [False, False, True, False, False, True] == answers
    assert (3, 4, 3 * 32) == (publisher.published, publisher.skipped, publisher.nbytes)
    assert Version(1, 6) == publisher.version == channel.version
    assert 3 == publisher.seconds.read().count


def test_readers_get_the_published_weights() -> None:
    channel = MemoryWeights()
    publisher = WeightPublisher(writer=channel)
    publisher.publish(Version(1, 0), flat(0))
    publisher.offer(Version(1, 1), None)
    into = flat(-1)
    assert (Version(1, 0), 0) == (channel.read_into(into), int(into.view(np.int64)[0]))


# A policy's own copy
# --------------------------------------------------------------------------------------------------


def test_a_policy_without_loaded_weights_has_no_version() -> None:
    _, holder, weights = opened()
    assert (NO_VERSION, 0) == (weights.refresh(), holder.loads)


def test_label_and_tensors_change_together() -> None:
    channel, holder, weights = opened()
    for number in (3, 4, 9):
        channel.publish(Version(1, number), flat(number))
        assert Version(1, number) == weights.refresh()
        assert number == holder.holds


def test_label_and_tensors_stay_old_until_a_refresh() -> None:
    channel, holder, weights = opened()
    channel.publish(Version(1, 1), flat(1))
    weights.refresh()
    channel.publish(Version(1, 2), flat(2))
    assert (Version(1, 1), 1) == (weights._version, holder.holds)


def test_a_load_that_fails_leaves_the_old_label() -> None:
    channel, holder, weights = opened()
    channel.publish(Version(1, 1), flat(1))
    weights.refresh()
    channel.publish(Version(1, 2), flat(2))
    holder.broken = True
    with pytest.raises(ValueError, match="does not fit"):
        weights.refresh()
    holder.broken = False
    assert 1 == holder.holds
    assert (Version(1, 2), 2) == (weights.refresh(), holder.holds)


def test_nothing_is_copied_without_newer_weights() -> None:
    channel, holder, weights = opened()
    channel.publish(Version(1, 1), flat(1))
    for _ in range(5):
        assert Version(1, 1) == weights.refresh()
    assert 1 == holder.loads


def test_a_late_older_version_does_not_replace_a_newer_one() -> None:
    channel, holder, weights = opened()
    for number in (7, 6):
        channel.publish(Version(1, number), flat(number))
        assert (Version(1, 7), 7) == (weights.refresh(), holder.holds)


def test_weights_newer_than_announced_are_labelled_with_their_own_version() -> None:
    class Ahead:
        """Announces version 1, and returns version 3, which arrived in the meantime."""

        version = Version(1, 1)

        def read_into(self, into: NDArray[np.uint8]) -> Version:
            into[:] = flat(3)
            return Version(1, 3)

        async def wait_newer_than(self, version: Version) -> Version:
            return version

    reader, holder = Ahead(), Holder()
    weights = PolicyWeights(reader=reader, policy=holder, nbytes=32)
    assert (Version(1, 3), 3) == (weights.refresh(), holder.holds)
    reader.version = Version(1, 2)
    assert (Version(1, 3), 1) == (weights.refresh(), holder.loads)
