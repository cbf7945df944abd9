"""Events are dropped and counted, the first ones kept; gaps in the numbers of a publisher are what
was lost on the way.
"""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tests.support.worlds import turns
from tianflow.channels.broadcast import Broadcast, GapCounter, Subscription
from tianflow.core.events import Event, HostExited, SettingsChanged


def event(number: int) -> Event:
    return SettingsChanged(number, ())


def events(count: int, first: int = 0) -> list[Event]:
    return [event(first + number) for number in range(count)]


def read(subscription: Subscription) -> list[Event]:
    return list(iter(subscription.receive_nowait, None))


def test_every_subscriber_gets_every_event_in_order() -> None:
    broadcast = Broadcast()
    subscriptions = [broadcast.subscribe() for _ in range(3)]
    for each in events(10):
        broadcast.publish(each)
    assert [events(10)] * 3 == [read(subscription) for subscription in subscriptions]
    assert (10, 0) == (broadcast.published, broadcast.dropped)


def test_a_slow_subscriber_keeps_the_oldest_and_counts_the_rest() -> None:
    broadcast = Broadcast()
    slow, fast = broadcast.subscribe(capacity=3), broadcast.subscribe(capacity=10)
    for each in events(8):
        broadcast.publish(each)
    assert (events(3), 5) == (read(slow), slow.dropped)
    assert (events(8), 0) == (read(fast), fast.dropped)
    assert 5 == broadcast.dropped


def test_without_subscribers_nothing_is_lost() -> None:
    broadcast = Broadcast()
    broadcast.publish(event(0))
    assert (1, 0) == (broadcast.published, broadcast.dropped)


def test_what_a_subscriber_lost_stays_counted_after_it_left() -> None:
    broadcast = Broadcast()
    subscription = broadcast.subscribe(capacity=1)
    for each in events(4):
        broadcast.publish(each)
    broadcast.unsubscribe(subscription)
    broadcast.publish(event(4))
    assert (3, events(1)) == (broadcast.dropped, read(subscription))


def test_what_was_lost_on_the_way_is_added() -> None:
    broadcast = Broadcast()
    broadcast.count_lost(4)
    broadcast.count_lost(0)
    assert 4 == broadcast.dropped


def test_a_reader_of_one_kind_loses_nothing_to_other_events() -> None:
    broadcast = Broadcast()
    exits = broadcast.subscribe(capacity=1, kind=HostExited)
    for number in range(3):
        broadcast.publish(event(number))
    broadcast.publish(HostExited("a", "killed"))
    assert (HostExited("a", "killed"), None, 0) == (
        exits.receive_nowait(),
        exits.receive_nowait(),
        broadcast.dropped,
    )


async def test_a_reader_waits_for_the_next_event() -> None:
    broadcast = Broadcast()
    subscription = broadcast.subscribe()
    reading = asyncio.ensure_future(subscription.receive())
    await turns(2)
    assert not reading.done()
    broadcast.publish(event(0))
    broadcast.publish(event(1))
    assert (event(0), event(1)) == (await reading, await subscription.receive())


async def test_a_cancelled_reader_loses_no_event() -> None:
    broadcast = Broadcast()
    subscription = broadcast.subscribe()
    for publish_first in (True, False):
        reading = asyncio.ensure_future(subscription.receive())
        await turns(2)
        if publish_first:
            broadcast.publish(event(0))
        reading.cancel()
        await asyncio.wait([reading])
        if not publish_first:
            broadcast.publish(event(0))
        assert event(0) == await asyncio.wait_for(subscription.receive(), 1)


@given(st.lists(st.booleans()))
def test_gaps_are_exactly_what_was_lost(arrived: list[bool]) -> None:
    counter = GapCounter()
    last = max((number for number, here in enumerate(arrived) if here), default=-1)
    lost = [counter.lost(number) for number, here in enumerate(arrived) if here]
    assert arrived[: last + 1].count(False) == sum(lost)
