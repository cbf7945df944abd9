"""Publishing of versions, and consistent label and tensors of a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tianflow.channels.memory import MemoryWeights
from tianflow.components.weights import PolicyWeights, WeightPublisher, publish_due
from tianflow.core.payloads import NO_VERSION, Version


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
        publisher.offer(Version(1, number), flat(number), interval=3, bound=9)
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
    publisher.offer(Version(1, 1), flat(1), interval=2, bound=9)
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
