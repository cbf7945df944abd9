"""Messages between the coordinator and the nodes of a run, one class each.

They travel in a `tianflow.channels.stream.ReliableStream` each way, through the gateway, which does
not read them. Messages of hosts lie in them as msgpack's plain values: a node relays them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from tianflow.channels.codec import Codec
from tianflow.channels.messages import PutSettings
from tianflow.core.payloads import EnvironmentSpec, TrajectoryLayout, Version

NODE_MESSAGES = Codec("message of a node")
message = NODE_MESSAGES.register
PROTOCOL = 1
"""Version of these messages and of those between gateway and node. Other versions are refused."""
DEAD_S = 2.0
"""Seconds without an acknowledgement by the other system, after which the connection between node
and gateway is replaced. TCP alone may wait as long again after an outage as the outage lasted. A
link that was down for less than the lease would cost the node then.
"""


@message
@dataclass(frozen=True, slots=True)
class OpenNode:
    """The first message to a new node: what its memory looks like, and what its hosts run.

    ``capacity``: slots that there is address space for. ``slots``: slots that exist. ``bells``:
    doorbells, those of ``servers`` inference servers first.
    """

    run: str
    settings: PutSettings
    spec: EnvironmentSpec
    layout: TrajectoryLayout
    capacity: int
    slots: int
    bells: int
    servers: int


@message
@dataclass(frozen=True, slots=True)
class NodeReady:
    """The node can make the environment of the run, and takes hosts."""


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
    """The messages in ``data``. BrokenChannelError if one is malformed."""
    unpacker = msgpack.Unpacker(use_list=True, strict_map_key=False, max_buffer_size=len(data))
    unpacker.feed(data)
    return [NODE_MESSAGES.decode(values) for values in unpacker]
