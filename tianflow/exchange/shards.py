"""A replay shard's end: requests wait, answers go out. The same object in memory and at the end of
a link.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tianflow.core.payloads import (
    DrawPart,
    DropItems,
    Holdings,
    Prioritise,
    SaveItems,
    ShardRequest,
    StateFile,
    StoreTrajectory,
)
from tianflow.errors import BrokenChannelError, WouldBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.channels.arena import Arena
    from tianflow.exchange.replay_exchange import ReplayExchange

_REQUESTS: dict[str, type[ShardRequest]] = {
    "store": StoreTrajectory,
    "draw": DrawPart,
    "prioritise": Prioritise,
    "drop": DropItems,
    "keep": SaveItems,
}
_NAMES = {cls: name for name, cls in _REQUESTS.items()}


class ShardEnd:
    """One shard's end: whoever waits for a draw does not wait for what is to be stored.

    Draws and priorities go before trajectories, which stay in order, as do draws and priorities;
    but nothing goes before what is about everything that is there, `DropItems` and `SaveItems`.
    `ask` is called by whoever brings requests; it is `tianflow.exchange.shard_records.ShardPort` in
    memory.

    Waits: for a request. Unblocked by: `ask`.

    Args:
        slots: of trajectories.
        draws: of draws.
        answer: takes ``stored``, ``drawn``, ``prioritised``, ``dropped`` or ``kept`` and what
            belongs to it, in order.
    """

    def __init__(self, *, slots: Arena, draws: Arena, answer: Callable[..., None]) -> None:
        self._slots, self._draws, self._answer = slots, draws, answer
        # Bounded by slots but for a few: almost every request is about one, and none is asked about
        # twice at a time.
        self._soon: deque[DrawPart | Prioritise] = deque()
        self._in_order: deque[ShardRequest] = deque()
        self._barriers = 0
        self._asked = asyncio.Event()

    def ask(self, request: ShardRequest) -> None:
        """Put it into the queue."""
        if isinstance(request, DrawPart | Prioritise) and not self._barriers:
            self._soon.append(request)
        else:
            self._barriers += isinstance(request, DropItems | SaveItems)
            self._in_order.append(request)
        self._asked.set()

    async def receive(self) -> ShardRequest:
        """The next request."""
        while not (self._soon or self._in_order):
            self._asked.clear()
            await self._asked.wait()
        return self.receive_nowait()

    def receive_nowait(self) -> ShardRequest:
        """The next request, if there is one. WouldBlock if there is none."""
        if self._soon:
            return self._soon.popleft()
        if not self._in_order:
            raise WouldBlock("nobody has asked the shard for anything")
        request = self._in_order.popleft()
        self._barriers -= isinstance(request, DropItems | SaveItems)
        return request

    def receive_soon(self) -> list[DrawPart | Prioritise]:
        """All draws and priorities that wait, in order; perhaps none."""
        waiting = list(self._soon)
        self._soon.clear()
        return waiting

    def trajectory(self, slot: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of a trajectory."""
        return self._slots.views(slot)

    def draw(self, slot: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of a draw."""
        return self._draws.views(slot)

    def stored(self, ticket: int, items: int, holdings: Holdings) -> None:
        """A trajectory was copied and brought so many items."""
        self._answer("stored", ticket, items, list(holdings))

    def drawn(self, draw: int, items: int, holdings: Holdings) -> None:
        """A part of a draw is written; 0 items: there are none."""
        self._answer("drawn", draw, items, list(holdings))

    def prioritised(self, draw: int, holdings: Holdings) -> None:
        """The priorities of a part of a draw were taken."""
        self._answer("prioritised", draw, list(holdings))

    def dropped(self, holdings: Holdings) -> None:
        """Everything was let go."""
        self._answer("dropped", list(holdings))

    def kept(self, file: StateFile | None, holdings: Holdings) -> None:
        """Everything was written, or, None, could not be."""
        self._answer(
            "kept",
            "" if file is None else file.sha256,
            0 if file is None else file.nbytes,
            list(holdings),
        )


class LinkShardPort:
    """The coordinator's way to a shard at the other end of a link. ``send`` sends one message, in
    order.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send

    def ask(self, request: ShardRequest) -> None:
        """By message."""
        self._send("shard", *encode_request(request))


def encode_request(request: ShardRequest) -> list[Any]:
    """Its name, and its fields in order."""
    return [_NAMES[type(request)], *(getattr(request, field.name) for field in fields(request))]


def decode_request(name: str, values: Sequence[Any]) -> ShardRequest:
    """The inverse of `encode_request`. BrokenChannelError if there is no such request, or its
    fields do not fit.
    """
    cls = _REQUESTS.get(name)
    if cls is None or len(values) != len(fields(cls)):
        raise BrokenChannelError(
            f"a message asks a shard for what this version does not know: {name!r}"
        )
    return cls(*values)


def answers(exchange: ReplayExchange, index: int, incarnation: int) -> Callable[..., None]:
    """What takes the answers of shard ``index`` in this life of it: the name, then the arguments,
    `Holdings` last as a list.
    """
    handlers: dict[str, Callable[..., None]] = {
        "stored": exchange.stored,
        "drawn": exchange.drawn,
        "prioritised": exchange.prioritised,
        "dropped": exchange.dropped,
        "kept": exchange.kept,
    }

    def answer(name: str, *arguments: Any) -> None:
        *rest, holdings = arguments
        handlers[name](index, incarnation, *rest, Holdings(*holdings))

    return answer
