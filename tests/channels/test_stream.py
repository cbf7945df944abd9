"""A stream loses nothing, repeats nothing and keeps the order, whatever its connections do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianflow.channels.frames import MalformedMessageError
from tianflow.channels.stream import WINDOW, ReliableStream, accepts


def connected(received: int = 0) -> ReliableStream[str]:
    stream: ReliableStream[str] = ReliableStream()
    stream.connected(received)
    return stream


def test_nothing_is_due_without_a_connection() -> None:
    stream: ReliableStream[str] = ReliableStream()
    stream.post("a")
    assert list(stream.due()) == []
    stream.connected(0)
    assert list(stream.due()) == [(1, "a")]


def test_a_message_is_due_once_on_each_connection_until_it_is_acknowledged() -> None:
    stream = connected()
    stream.post("a")
    stream.post("b")
    assert list(stream.due()) == [(1, "a"), (2, "b")]
    assert list(stream.due()) == []
    stream.disconnected()
    stream.connected(1)
    assert list(stream.due()) == [(2, "b")]
    stream.acknowledge(2)
    assert len(stream) == 0


def test_no_more_than_a_window_is_on_its_way() -> None:
    stream = connected()
    for number in range(WINDOW + 10):
        stream.post(str(number))
    assert len(list(stream.due())) == WINDOW
    stream.acknowledge(4)
    assert [number for number, _ in stream.due()] == [
        WINDOW + 1,
        WINDOW + 2,
        WINDOW + 3,
        WINDOW + 4,
    ]


def test_an_old_acknowledgement_has_no_effect() -> None:
    stream = connected()
    stream.post("a")
    stream.post("b")
    list(stream.due())
    stream.acknowledge(2)
    stream.acknowledge(1)
    stream.post("c")
    assert list(stream.due()) == [(3, "c")]


def test_what_was_never_sent_cannot_be_acknowledged() -> None:
    stream = connected()
    with pytest.raises(MalformedMessageError, match="message 1 is acknowledged and was never sent"):
        stream.acknowledge(1)
    with pytest.raises(MalformedMessageError):
        stream.connected(5)


def test_a_repetition_is_not_accepted_and_a_gap_is_an_error() -> None:
    stream = connected()
    assert stream.accept(1)
    assert not stream.accept(1)
    assert stream.received == 1
    with pytest.raises(MalformedMessageError, match="message 3 follows message 1"):
        stream.accept(3)
    assert accepts(1, 2)
    assert not accepts(2, 2)


STEPS = st.lists(
    st.sampled_from(("post", "carry", "lose", "acknowledge", "reconnect")), max_size=80
)


@given(STEPS)
def test_every_message_arrives_once_and_in_order_over_any_connections(steps: list[str]) -> None:
    """A connection delivers a prefix of what was sent on it, and then is lost."""
    sender, receiver = connected(), connected()
    wire: list[tuple[int, str]] = []
    arrived: list[str] = []
    posted = 0

    def carry(limit: int) -> None:
        for number, text in wire[:limit]:
            if receiver.accept(number):
                arrived.append(text)
        del wire[:limit]

    for step in [*steps, "reconnect", "carry"]:
        match step:
            case "post":
                posted += 1
                sender.post(str(posted))
            case "carry":
                carry(len(wire))
            case "lose":
                carry(len(wire) // 2)
                wire.clear()
                sender.disconnected()
            case "acknowledge":
                sender.acknowledge(receiver.received)
            case "reconnect":
                wire.clear()
                sender.connected(receiver.received)
        wire += list(sender.due())
        if step in ("reconnect", "carry"):
            carry(len(wire))
    assert arrived == [str(number + 1) for number in range(posted)]
