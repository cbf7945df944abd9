"""What a link promises: everything arrives, in order and once, or the other end is gone and both
sides know it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgpack
import pytest
import uvloop

from tests.support.worlds import small_layout
from tianflow.channels.broadcast import GapCounter
from tianflow.channels.link import EVENT_BACKLOG, PACKET, Link, socket_pair
from tianflow.channels.memory import heap_arena
from tianflow.channels.messages import (
    MESSAGES,
    BatchReady,
    Begin,
    Commit,
    EventPublished,
    PullBatch,
    RequestGrants,
    message,
)
from tianflow.core.events import Event, HostExited
from tianflow.core.limits import Limits
from tianflow.core.payloads import Settlement, Trajectory, Version
from tianflow.errors import BrokenChannelError
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.remote import LinkBatchSource, LinkTrajectorySender, ServedExchange
from tianflow.ledger.ledger import Ledger


@message
class Word(NamedTuple):
    """What these tests send."""

    text: str
    number: int = 0
    data: bytes = b""


def words(*texts: str) -> list[Word]:
    return [Word(text) for text in texts]


def numbers(count: int) -> list[Word]:
    return [Word("number", number) for number in range(count)]


def exited(host: str) -> HostExited:
    """An event."""
    return HostExited(host, "died")


def fat() -> Event:
    """An event that fills a packet."""
    return exited("x" * PACKET)


class End:
    """A link that keeps what it hears. ``paused`` stops it from reading."""

    def __init__(self, end: socket.socket) -> None:
        self.heard: list[Any] = []
        self.lost = 0
        self.failures: list[Exception] = []
        self.on_message: Callable[[Any], None] = self.heard.append
        self._changed = asyncio.Event()
        self._socket = end
        self.link = Link(
            end=end, handle=self._handle, closed=self._closed, failed=self.failures.append
        )

    def _handle(self, message: object) -> None:
        self.on_message(message)
        self._changed.set()

    def _closed(self) -> None:
        self.lost += 1
        self._changed.set()

    def pause(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())

    def resume(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self.link.handle_one)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[End, End]]:
    mishaps: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    ours, theirs = socket_pair()
    pair = End(ours), End(theirs)
    yield pair
    for end in pair:
        end.link.close()
    await turn()
    assert [] == mishaps


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    async with opened() as pair:
        yield pair


Pair = tuple[End, End]


async def test_what_is_pushed_is_with_the_kernel_before_this_turn_is_over(ends: Pair) -> None:
    here, there = ends
    here.link.send(Word("first"))
    here.link.send(Word("second"))
    there.link.drain()
    assert [] == there.heard
    here.link.push()
    there.link.drain()
    assert words("first", "second") == there.heard


async def test_a_pull_and_the_settlement_before_it_do_not_wait_for_the_end_of_the_turn(
    ends: Pair,
) -> None:
    """Actors may wait for its credits while the learner's loop begins the next update."""
    here, there = ends
    source = LinkBatchSource(link=here.link, arena=heap_arena(small_layout(), 1))
    source.settle(Settlement(Version(1, 1), (0,), 1, published=True, skipped=False))
    pulled = source.next_batch(Version(1, 2))
    there.link.drain()
    assert [Settlement, PullBatch] == [type(message) for message in there.heard]
    pulled.close()


async def test_a_batch_leaves_before_whatever_else_this_turn_brings(ends: Pair) -> None:
    here, there = ends
    exchange = Exchange(
        ledger=Ledger(limits=Limits(batch=1, max_staleness=0, credits=1), slots=1),
        arena=heap_arena(small_layout(), 1),
    )
    exchange.open_lineage(Version(1, 0))
    grant = exchange.ledger.grant("a")
    assert grant is not None
    handlers = ServedExchange(
        exchange=exchange, link=here.link, on_episodes=lambda *_: None
    ).handlers
    handlers[PullBatch](PullBatch(1, grant.version))
    handlers[Begin](Begin(grant.ticket, grant.version))
    there.link.drain()
    assert [] == there.heard
    handlers[Commit](Commit("a", Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), ()))
    there.link.drain()
    assert [BatchReady] == [type(message) for message in there.heard]


async def test_a_grant_is_asked_for_at_the_call_together_with_the_commit_before_it(
    ends: Pair,
) -> None:
    here, there = ends
    sender = LinkTrajectorySender(
        link=here.link, arena=heap_arena(small_layout(), 1), holder="a", announce=lambda _: None
    )
    sender.commit(Trajectory(0, 0, 1, 1, Version(1, 0)), ())
    asked = sender.acquire()
    here.link.push()
    there.link.drain()
    assert [Commit, RequestGrants] == [type(message) for message in there.heard]
    asked.close()


async def turn() -> None:
    await asyncio.sleep(0)


def fill(end: End) -> int:
    """Send until the kernel takes no more; how many messages that took."""
    count = 0
    while not end.link._backlog:
        end.link.send(Word("fill", count, bytes(PACKET)))
        end.link.push()
        count += 1
    return count


# Order
# --------------------------------------------------------------------------------------------------


async def test_what_is_sent_in_one_turn_arrives_in_order(ends: Pair) -> None:
    us, them = ends
    for number in range(5):
        us.link.send(Word("number", number))
    await them.until(lambda: len(them.heard) == 5)
    assert numbers(5) == them.heard


async def test_what_is_sent_in_one_turn_is_one_packet() -> None:
    ours, theirs = socket_pair()
    link = Link(end=ours, handle=lambda _: None, closed=lambda: None)
    with theirs:
        for number in range(5):
            link.send(Word("number", number))
        await turn()
        assert numbers(5) == [
            MESSAGES.decode(values) for values in msgpack.unpackb(theirs.recv(PACKET))
        ]
    link.close()


async def test_a_hundred_thousand_messages_arrive_in_order_over_a_full_socket(ends: Pair) -> None:
    us, them = ends
    them.pause()
    for number in range(100_000):
        us.link.send(Word("some text of a common length", number))
    await turn()
    assert us.link._backlog, "the burst was meant to be more than the socket takes"
    them.resume()
    await them.until(lambda: len(them.heard) == 100_000)
    assert list(range(100_000)) == [message.number for message in them.heard]


async def test_both_directions_can_be_full_at_once(ends: Pair) -> None:
    for end in ends:
        for number in range(20_000):
            end.link.send(Word("some text of a common length", number))
    for end in ends:
        await end.until(lambda end=end: len(end.heard) == 20_000)  # type: ignore[misc]  # mypy does not infer lambda defaults
        assert list(range(20_000)) == [message.number for message in end.heard]


@pytest.mark.parametrize("nbytes", [PACKET - 20, PACKET, PACKET + 1, 3 * PACKET, 20 * PACKET])
async def test_a_message_of_any_length_arrives_whole_between_its_neighbours(
    ends: Pair, nbytes: int
) -> None:
    us, them = ends
    payload = bytes(range(256)) * (nbytes // 256 + 1)
    us.link.send(Word("before"))
    us.link.send(Word("long", 0, payload[:nbytes]))
    us.link.send(Word("after"))
    await them.until(lambda: len(them.heard) == 3)
    assert [Word("before"), Word("long", 0, payload[:nbytes]), Word("after")] == them.heard


async def test_messages_that_are_sent_while_others_wait_come_after_them(ends: Pair) -> None:
    us, them = ends
    them.pause()
    count = fill(us)
    us.link.send(Word("last"))
    await turn()
    them.resume()
    await them.until(lambda: len(them.heard) == count + 1)
    assert [*range(count), "last"] == [
        message.number if message.text == "fill" else message.text for message in them.heard
    ]


async def test_another_thread_may_send(ends: Pair) -> None:
    us, them = ends
    thread = threading.Thread(target=lambda: us.link.send_threadsafe(Word("from a thread")))
    thread.start()
    await them.until(lambda: bool(them.heard))
    assert words("from a thread") == them.heard
    thread.join()


def test_sending_from_a_thread_whose_loop_is_closed_does_nothing() -> None:
    ours, theirs = socket_pair()

    async def open_link() -> Link:
        return Link(end=ours, handle=lambda message: None, closed=lambda: None)

    link = asyncio.run(open_link())
    link.send_threadsafe(Word("into the void"))
    with ours, theirs, pytest.raises(BlockingIOError):
        theirs.recv(1)


# What is not a message
# --------------------------------------------------------------------------------------------------


async def test_a_malformed_message_is_an_error_and_the_messages_around_it_arrive(
    ends: Pair,
) -> None:
    us, them = ends
    us.link.send(Word("before"))
    us.link._turn.append(msgpack.packb(["Word", [1]]))
    us.link.send(Word("after"))
    await them.until(lambda: len(them.heard) == 2)
    assert words("before", "after") == them.heard
    (error,) = them.failures
    assert isinstance(error, BrokenChannelError)
    assert "Word" in str(error)


@pytest.mark.parametrize("packet", [b"\x93", b"\x07", b"\xc1\xc1\xc1", b"\x81\x01\x02"])
async def test_a_malformed_packet_is_an_error_and_the_next_packet_arrives(
    packet: bytes, ends: Pair
) -> None:
    """Truncated, a number, a part that is not msgpack, a map."""
    us, them = ends
    us.link._end.send(packet)
    us.link.send(Word("after"))
    await them.until(lambda: len(them.heard) == 1)
    assert words("after") == them.heard
    assert [BrokenChannelError] == [type(error) for error in them.failures]


async def test_what_a_handler_raises_is_given_to_the_owner_and_the_next_message_arrives(
    ends: Pair,
) -> None:
    us, them = ends

    def handle(message: Any) -> None:
        them.heard.append(message)
        if message.text == "bad":
            raise KeyError("bad")

    them.on_message = handle
    us.link.send(Word("bad"))
    us.link.send(Word("good"))
    await them.until(lambda: len(them.heard) == 2)
    assert ["bad"] == [error.args[0] for error in them.failures]


# The other end is gone
# --------------------------------------------------------------------------------------------------


async def test_a_lost_peer_is_noticed_once(ends: Pair) -> None:
    us, them = ends
    us.link.send(Word("bye"))
    await turn()
    us.link.close()
    await them.until(lambda: them.lost > 0)
    for _ in range(3):
        them.link.send(Word("nobody hears this"))
        await turn()
        them.link.drain()
    assert (words("bye"), 1) == (them.heard, them.lost)


async def test_closing_ones_own_end_is_no_loss(ends: Pair) -> None:
    us, _ = ends
    us.link.close()
    us.link.close()
    await turn()
    assert 0 == us.lost


async def test_nothing_is_sent_after_close(ends: Pair) -> None:
    us, them = ends
    us.link.send(Word("unsent"))
    us.link.close()
    us.link.send(Word("never"))
    us.link.send_event(exited("never"))
    await turn()
    await them.until(lambda: them.lost > 0)
    assert [] == them.heard


async def test_nothing_is_handled_after_close(ends: Pair) -> None:
    us, them = ends

    def handle(message: object) -> None:
        them.heard.append(message)
        them.link.close()

    them.on_message = handle
    for number in range(3):
        us.link.send(Word("number", number))
    await us.until(lambda: us.lost > 0)
    assert numbers(1) == them.heard


async def test_last_words_are_heard_although_we_spoke_to_a_dead_peer_first(ends: Pair) -> None:
    us, them = ends
    them.pause()
    us.link.send(Word("last words"))
    await us.link.flush()
    us.link.close()
    them.link.send(Word("hello?"))
    await them.link.flush()
    assert [] == them.heard
    them.link.drain()
    assert (words("last words"), 1) == (them.heard, them.lost)


async def test_last_words_are_heard_although_the_peer_left_without_reading_ours(ends: Pair) -> None:
    us, them = ends
    us.pause()
    them.link.send(Word("unread"))
    await them.link.flush()
    us.link.send(Word("last words"))
    await us.link.flush()
    us.link._end.close()
    await them.until(lambda: them.lost > 0)
    assert (words("last words"), 1) == (them.heard, them.lost)
    us.link._open = False  # its socket is closed already


async def test_draining_handles_everything_that_arrived(ends: Pair) -> None:
    us, them = ends
    them.pause()
    for number in range(1000):
        us.link.send(Word("number", number, bytes(100)))
    await us.link.flush()
    us.link.close()
    them.link.drain()
    assert (list(range(1000)), 1) == ([message.number for message in them.heard], them.lost)


async def test_draining_an_empty_link_returns(ends: Pair) -> None:
    us, _ = ends
    us.link.drain()
    assert ([], 0) == (us.heard, us.lost)


# Flushing
# --------------------------------------------------------------------------------------------------


async def test_flush_waits_for_the_kernel_to_take_everything(ends: Pair) -> None:
    us, them = ends
    them.pause()
    count = fill(us)
    flushing = asyncio.ensure_future(us.link.flush())
    await turn()
    assert not flushing.done()
    them.resume()
    await asyncio.wait_for(flushing, 10)
    await them.until(lambda: len(them.heard) == count)


async def test_flush_returns_when_the_peer_dies(ends: Pair) -> None:
    us, them = ends
    them.pause()
    fill(us)
    flushing = asyncio.ensure_future(us.link.flush())
    await turn()
    them.link.close()
    await asyncio.wait_for(flushing, 10)
    await us.until(lambda: us.lost > 0)
    assert 1 == us.lost


async def test_flush_returns_when_our_end_is_closed(ends: Pair) -> None:
    us, them = ends
    them.pause()
    fill(us)
    flushing = asyncio.ensure_future(us.link.flush())
    await turn()
    us.link.close()
    await asyncio.wait_for(flushing, 10)


async def test_flush_of_an_idle_link_returns_at_once(ends: Pair) -> None:
    us, _ = ends
    await us.link.flush()
    us.link.close()
    await us.link.flush()


# Events
# --------------------------------------------------------------------------------------------------


async def test_events_are_dropped_behind_a_reader_that_stops_and_every_gap_is_counted(
    ends: Pair,
) -> None:
    us, them = ends
    them.pause()
    sent = 0
    while len(us.link._backlog) < EVENT_BACKLOG:
        us.link.send_event(fat())
        sent += 1
        await turn()
    assert us.link._held is None
    for _ in range(100):
        us.link.send_event(exited("late"))
        sent += 1
    them.resume()
    await them.until(lambda: bool(them.heard) and them.heard[-1].sequence == sent - 1)
    us.link.send_event(exited("afterwards"))
    await them.until(lambda: them.heard[-1].event == exited("afterwards"))
    counter = GapCounter()
    lost = sum(counter.lost(message.sequence) for message in them.heard)
    assert sent + 1 == len(them.heard) + lost
    assert 99 == lost, "all that was published while there was no room, but for the last"
    sequences = [message.sequence for message in them.heard]
    assert sorted(sequences) == sequences


async def test_the_last_event_of_a_burst_tells_of_the_gap_before_it(ends: Pair) -> None:
    us, them = ends
    them.pause()
    for _ in range(EVENT_BACKLOG + 10):
        us.link.send(Word("data", 0, bytes(PACKET)))
    await turn()
    for number in range(7):
        us.link.send_event(exited(f"{number}"))
    them.resume()
    flushing = asyncio.ensure_future(us.link.flush())
    await them.until(lambda: them.heard[-1:] == [EventPublished(6, exited("6"))])
    await flushing
    assert 1 == sum(isinstance(message, EventPublished) for message in them.heard)


async def test_an_event_that_found_no_room_is_not_told_after_a_newer_one(ends: Pair) -> None:
    us, them = ends
    them.pause()
    for _ in range(EVENT_BACKLOG + 10):
        us.link.send(Word("data", 0, bytes(PACKET - 100)))
    await turn()
    us.link.send_event(exited("held"))
    while len(us.link._backlog) >= EVENT_BACKLOG:
        them.link.handle_one()
        us.link._writable()
    us.link.send_event(exited("newer"))
    them.resume()
    await us.link.flush()
    us.link.send(Word("end"))
    await them.until(lambda: them.heard[-1:] == words("end"))
    assert [EventPublished(1, exited("newer"))] == [
        message for message in them.heard if isinstance(message, EventPublished)
    ]


async def test_messages_are_kept_where_events_are_dropped(ends: Pair) -> None:
    us, them = ends
    them.pause()
    for _ in range(EVENT_BACKLOG + 10):
        us.link.send(Word("data", 0, bytes(PACKET)))
    await turn()
    us.link.send_event(exited("dropped"))
    us.link.send_event(exited("held"))
    us.link.send(Word("commit"))
    them.resume()
    await them.until(lambda: them.heard[-1:] == [EventPublished(1, exited("held"))])
    assert Word("commit") in them.heard


async def test_sending_never_waits_for_a_reader_that_stopped(ends: Pair) -> None:
    us, them = ends
    them.pause()
    for _ in range(200):
        us.link.send_event(exited("x" * (PACKET - 100)))
        await turn()
    assert EVENT_BACKLOG == len(us.link._backlog)


# Loops
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fact",
    [
        test_a_hundred_thousand_messages_arrive_in_order_over_a_full_socket,
        test_both_directions_can_be_full_at_once,
        test_a_lost_peer_is_noticed_once,
        test_closing_ones_own_end_is_no_loss,
        test_nothing_is_handled_after_close,
        test_last_words_are_heard_although_we_spoke_to_a_dead_peer_first,
        test_last_words_are_heard_although_the_peer_left_without_reading_ours,
        test_flush_waits_for_the_kernel_to_take_everything,
        test_flush_returns_when_the_peer_dies,
        test_the_last_event_of_a_burst_tells_of_the_gap_before_it,
    ],
    ids=lambda fact: fact.__name__,
)
def test_on_the_loop_that_runs_use_the_same_holds(
    fact: Callable[[Pair], Coroutine[Any, Any, None]],
) -> None:
    async def hold() -> None:
        async with opened() as pair:
            await fact(pair)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hold())
