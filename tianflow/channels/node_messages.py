"""Messages between the coordinator and the nodes of a run, one class each.

They travel in a `tianflow.channels.stream.ReliableStream` each way, through the gateway, which does
not read them. Messages of hosts lie in them as msgpack's plain values: a node relays them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from tianflow.channels.codec import Codec
from tianflow.channels.messages import PutSettings
from tianflow.core.payloads import EnvironmentSpec, TrajectoryLayout, Version
from tianflow.errors import BrokenChannelError

NODE_MESSAGES = Codec("message of a node")
message = NODE_MESSAGES.register
PROTOCOL = 2
"""Version of these messages and of those between gateway and node. Other versions are refused."""
DEAD_S = 2.0
"""Seconds without an acknowledgement by the other system, after which the connection between node
and gateway is replaced. TCP alone may wait as long again after an outage as the outage lasted. A
link that was down for less than the lease would cost the node then.
"""
MOST_BYTES = 16 * 1024**2
"""Most bytes of packed messages that are unpacked. A byte of them can stand for an object of 64."""
SMALL = 4096
"""Bytes of packed messages from which lengths are verified before memory is reserved for them."""


@message
@dataclass(frozen=True, slots=True)
class OpenNode:
    """The first message to a new node: what its memory looks like, and what its hosts run.

    ``capacity``: slots that there is address space for. ``slots``: slots that exist. ``bells``:
    doorbells, those of ``servers`` inference servers first. ``draws``: of a draw, with
    ``draw_slots`` slots, if the node may get replay shards. ``directory``: of the run, which such
    a node has to see if it is not "".
    """

    run: str
    settings: PutSettings
    spec: EnvironmentSpec
    layout: TrajectoryLayout
    capacity: int
    slots: int
    bells: int
    servers: int
    draws: TrajectoryLayout | None = None
    draw_slots: int = 0
    directory: str = ""


class DirectAddress(NamedTuple):
    """Where node ``node`` listens for trajectories of other nodes, and its public key there; "":
    connections are not encrypted.
    """

    node: str
    address: str
    key: str


@message
@dataclass(frozen=True, slots=True)
class NodeReady:
    """The node can make the environment of the run, and takes hosts. It listens for trajectories of
    other nodes at ``address`` (see `DirectAddress`); "": it does not.
    """

    address: str = ""
    key: str = ""


@message
@dataclass(frozen=True, slots=True)
class SetPlaces:
    """Where nodes listen for trajectories of others now, by place."""

    places: Mapping[str, DirectAddress]


@message
@dataclass(frozen=True, slots=True)
class DirectTraffic:
    """Bytes of trajectories that the node has sent to other nodes and received from them so far,
    connections of other nodes that it has accepted, and those refused or lost, by reason.
    """

    sent: int
    received: int
    accepted: int
    refused: Mapping[str, int]


@message
@dataclass(frozen=True, slots=True)
class NodeUnable:
    """The node cannot take hosts: an environment or a plug-in cannot be imported, or its memory is
    too small.
    """

    reason: str


@message
@dataclass(frozen=True, slots=True)
class NodeLeaves:
    """The node was asked to end: its hosts are to hand over what they have, and leave."""


@message
@dataclass(frozen=True, slots=True)
class CloseNode:
    """No host of the node is left, and it ends."""


@message
@dataclass(frozen=True, slots=True)
class SetSlots:
    """The run has ``slots`` slots now."""

    slots: int


@message
class RequestCut(NamedTuple):
    """The steps that ``ticket`` has so far are wanted."""

    slot: int
    ticket: int


@message
@dataclass(frozen=True, slots=True)
class ForkHost:
    """Start host ``number``. It reads weights of ``version``, so it starts once they are there."""

    number: int
    name: str
    payload: bytes
    version: Version


@message
@dataclass(frozen=True, slots=True)
class HostForked:
    """Host ``number`` is the process ``pid``."""

    number: int
    pid: int


@message
@dataclass(frozen=True, slots=True)
class HostRefused:
    """Host ``number`` could not be started."""

    number: int
    reason: str


@message
@dataclass(frozen=True, slots=True)
class KillHost:
    """End host ``number`` now."""

    number: int


@message
@dataclass(frozen=True, slots=True)
class HostGone:
    """Host ``number`` and its process group are gone. ``status``: as of
    `tianflow.interfaces.HostProcess.wait`.
    """

    number: int
    status: int


@message
class ToHost(NamedTuple):
    """A message for host ``number``."""

    number: int
    message: Any


@message
class FromHost(NamedTuple):
    """A message of host ``number``."""

    number: int
    message: Any


def pack(messages: Iterable[object]) -> bytes:
    """``messages`` as bytes."""
    packer = msgpack.Packer()
    return b"".join(packer.pack(NODE_MESSAGES.encode(message)) for message in messages)


def unpack(data: bytes) -> list[Any]:
    """The messages in ``data``. BrokenChannelError if one is malformed, or cut off."""
    if len(data) > MOST_BYTES:
        raise BrokenChannelError(f"{len(data)} bytes of messages: at most {MOST_BYTES} are read")
    try:
        # A list reserves memory for what it only announces, once for each level of nesting.
        if len(data) > SMALL:
            unpacker = _unpacker(data)
            while unpacker.tell() < len(data):
                unpacker.skip()
        unpacker, found = _unpacker(data), list[Any]()
        while unpacker.tell() < len(data):
            found.append(NODE_MESSAGES.decode(unpacker.unpack()))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BrokenChannelError(f"messages cannot be unpacked: {error!r:.200}") from error
    return found


def _unpacker(data: bytes) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(use_list=True, strict_map_key=False, max_buffer_size=len(data))
    unpacker.feed(data)
    return unpacker
