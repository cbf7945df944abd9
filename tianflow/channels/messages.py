"""Messages between the coordinator and a host, one class each.

A message to do something is imperative, a message of what happened is past tense. To add one, write
its class here with ``@message``, and a handler for the class at the side that receives it. Messages
that are sent for every trajectory or update are NamedTuples, which cost half of a frozen dataclass.
Payloads that say everything by themselves (`Settlement`, requests to a replay shard) are messages
as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias

from tianflow.channels.codec import Codec
from tianflow.config.model import Config
from tianflow.core import events
from tianflow.core.payloads import (
    Activity,
    Batch,
    DrawPart,
    DropItems,
    Episode,
    Evaluation,
    Grant,
    Holdings,
    Prioritise,
    SavedState,
    SaveItems,
    Settlement,
    StateFile,
    StoreTrajectory,
    Trajectory,
    TrajectoryLayout,
    Version,
)
from tianflow.core.program import ComponentSpec, HostPlan
from tianflow.core.statistics import ComponentStatistics
from tianflow.errors import BrokenChannelError
from tianflow.interfaces import LiveSettings

EVENTS = Codec("event")
"""Every event, by its name."""
for _event in vars(events).values():
    if isinstance(_event, type) and issubclass(_event, events.Event) and _event is not events.Event:
        EVENTS.register(_event)

MESSAGES = Codec("message", {events.Event: EVENTS})
"""Every message, by its name."""
message = MESSAGES.register


class Handlers(dict[type, Callable[[Any], object]]):
    """The handler of each class of message that one side receives."""

    def __missing__(self, cls: type) -> NoReturn:
        raise BrokenChannelError(f"a message {cls.__name__} was not expected here")


# Actors and the learner, to the exchange
# --------------------------------------------------------------------------------------------------


@message
class RequestGrants(NamedTuple):
    """An actor wants ``wanted`` more grants. ``end`` is the incarnation of its end in its host."""

    holder: str
    end: int
    wanted: int


@message
class CancelRequests(NamedTuple):
    """An actor wants no more grants."""

    holder: str


@message
class Begin(NamedTuple):
    """An actor takes the first step of a trajectory, with ``version``."""

    ticket: int
    version: Version


@message
class Commit(NamedTuple):
    """An actor hands over a trajectory, and the episodes that ended in it. ``place``: the machine
    where its data lie; "": the head. Only a node names another one.
    """

    holder: str
    trajectory: Trajectory
    episodes: tuple[Episode, ...]
    place: str = ""


@message
class Abort(NamedTuple):
    """An actor gives a ticket back unused."""

    ticket: int
    slot: int
    reason: str


@message
class PullBatch(NamedTuple):
    """The learner asks for a batch. ``pull`` numbers its requests."""

    pull: int
    for_version: Version


@message
class CancelPull(NamedTuple):
    """The learner no longer waits for a batch."""


@message
class GiveBack(NamedTuple):
    """The learner did not use the batch of these tickets."""

    tickets: tuple[int, ...]


@message
class OpenLineage(NamedTuple):
    """The learner published the first version of a lineage."""

    version: Version


@message
class VersionPublished(NamedTuple):
    """The learner published a version between two updates."""

    version: Version


message(Settlement)

# The exchange, to actors and the learner
# --------------------------------------------------------------------------------------------------


@message
class Granted(NamedTuple):
    """One grant for the end that requested it."""

    holder: str
    end: int
    grant: Grant


@message
class GrantsEnded(NamedTuple):
    """The run wants no more trajectories: the answer to one requested grant."""

    holder: str
    end: int


@message
class BatchReady(NamedTuple):
    """The batch that answers request ``pull``."""

    pull: int
    batch: Batch


@message
class BatchesEnded(NamedTuple):
    """The run makes no more batches."""


# Replay shards. Requests are payloads; every answer says what the shard holds now.
# --------------------------------------------------------------------------------------------------

for _request in (StoreTrajectory, DrawPart, Prioritise, DropItems, SaveItems):
    message(_request)


@message
class Stored(NamedTuple):
    """A trajectory was copied, which brought ``items`` new items."""

    ticket: int
    items: int
    holdings: Holdings


@message
class Drawn(NamedTuple):
    """A part of a draw is written. ``items`` 0: nothing may be drawn, or too few draws are left."""

    draw: int
    items: int
    holdings: Holdings


@message
class Prioritised(NamedTuple):
    """The priorities of a part of a draw were applied."""

    draw: int
    holdings: Holdings


@message
class Dropped(NamedTuple):
    """Everything was dropped; or, as the first answer of a shard, what it starts with."""

    holdings: Holdings


@message
class ItemsSaved(NamedTuple):
    """Everything was written into ``file``; None: it could not be written."""

    file: StateFile | None
    holdings: Holdings


ShardAnswer: TypeAlias = Stored | Drawn | Prioritised | Dropped | ItemsSaved

# Components, to the coordinator
# --------------------------------------------------------------------------------------------------


@message
class EventPublished(NamedTuple):
    """An event for observers. ``sequence`` counts the events of a host; a gap shows a lost one."""

    sequence: int
    event: events.Event


@message
class Heartbeat(NamedTuple):
    """A host's loop works. ``activities``: what its components do with their environments."""

    activities: tuple[Activity, ...]


@message
class RecordLogged(NamedTuple):
    """A log record of a host.

    Attributes:
        level: number of the severity, as in `logging`.
        logger: name of the logger, without ``tianflow.``.
        event: the message.
        values: the bound values, as text.
    """

    level: int
    logger: str
    event: str
    values: Mapping[str, str]


@message
class StatisticsReported(NamedTuple):
    """The newest numbers of components."""

    components: tuple[ComponentStatistics, ...]


@message
@dataclass(frozen=True, slots=True)
class ComponentStarted:
    """A component works."""

    name: str


@message
@dataclass(frozen=True, slots=True)
class ComponentEnded:
    """A component has ended, as it was asked to."""

    name: str


@message
@dataclass(frozen=True, slots=True)
class HostFailed:
    """A host cannot continue. The fields are those of `tianflow.errors.RunError`."""

    component: str
    summary: str
    details: str


# Requests to learner and evaluator, numbered, and their answers
# --------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class SaveState:
    """Write the learner's state into ``directory``."""

    request: int
    directory: Path


@message
@dataclass(frozen=True, slots=True)
class StateSaved:
    """The learner's state is written."""

    request: int
    state: SavedState


@message
@dataclass(frozen=True, slots=True)
class StateNotSaved:
    """The learner's state could not be written."""

    request: int
    reason: str


@message
@dataclass(frozen=True, slots=True)
class RestLearner:
    """Publish the newest version at the next boundary, where the learner rests."""

    request: int


@message
@dataclass(frozen=True, slots=True)
class LearnerRested:
    """The learner rests at ``version``, which is published."""

    request: int
    version: Version


@message
@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """Load the newest version, which is ``at_least`` this one, for evaluations."""

    request: int
    at_least: Version


@message
@dataclass(frozen=True, slots=True)
class PolicyLoaded:
    """Evaluations play ``version`` until another one is loaded."""

    request: int
    version: Version


@message
@dataclass(frozen=True, slots=True)
class Evaluate:
    """Play the evaluation ``name`` with the version that was loaded last, which is ``at_least``
    this one.
    """

    request: int
    at_least: Version
    name: str


@message
@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation."""

    request: int
    evaluation: Evaluation


@message
@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """An environment failed in an evaluation; ``details`` is its traceback."""

    request: int
    summary: str
    details: str


# Coordinator, to hosts
# --------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class PutSettings:
    """Live settings in force. ``key``: of the value among all. ``config`` is `Config` as JSON
    values.
    """

    key: int
    generation: int
    config: Mapping[str, Any]
    bound: int | None
    paused: bool
    hold_learner: bool

    @classmethod
    def of(cls, live: LiveSettings, key: int) -> Self:
        """``live`` as a message."""
        plain = json.loads(live.config.model_dump_json())
        return cls(key, live.generation, plain, live.bound, live.paused, live.hold_learner)

    @property
    def live(self) -> LiveSettings:
        """The settings. ValueError if ``config`` is not a valid config."""
        config = Config.model_validate(self.config)
        return LiveSettings(config, self.bound, self.paused, self.hold_learner, self.generation)


@message
class TrainOnBatch(NamedTuple):
    """Rank 0 of the learner orders an update on the batch of ``trajectories``, at which the run has
    done ``steps``, ``updates`` and ``seconds`` (`tianflow.config.schedules.Elapsed`).

    ``settings``: those of this update, if they differ from those of the last order. ``staged``: a
    `StageBatch` of the batch was sent before.
    """

    steps: float
    updates: float
    seconds: float
    trajectories: tuple[Trajectory, ...]
    settings: PutSettings | None
    staged: bool


@message
class StageBatch(NamedTuple):
    """Rank 0 of the learner asks the others to copy the batch of ``trajectories`` to their devices.
    It may refuse the batch before the update.
    """

    trajectories: tuple[Trajectory, ...]


@message
@dataclass(frozen=True, slots=True)
class StartHost:
    """What a host starts with. ``address`` names its transport, e.g. ``shm://``."""

    plan: HostPlan
    settings: PutSettings
    address: str


@message
@dataclass(frozen=True, slots=True)
class SetComponents:
    """Run exactly these components."""

    components: tuple[ComponentSpec, ...]


@message
@dataclass(frozen=True, slots=True)
class Stop:
    """Flush and leave."""


# The coordinator and the gateway of a run on several machines
# --------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class StartGateway:
    """What a gateway starts with.

    Attributes:
        address: ``tcp://HOST:PORT`` where it listens.
        keys: those of the run, by name, in Z85; empty: connections are not encrypted.
        layout: of a trajectory.
        draws: of a draw; None: without replay.
        encoding: of trajectories on their way to nodes (``cluster.encoding``).
    """

    address: str
    keys: Mapping[str, str]
    layout: TrajectoryLayout
    draws: TrajectoryLayout | None = None
    encoding: str = "plain"


@message
@dataclass(frozen=True, slots=True)
class GatewayListens:
    """The gateway listens at ``address``."""

    address: str


@message
@dataclass(frozen=True, slots=True)
class GatewayFailed:
    """The gateway cannot listen."""

    reason: str


@message
@dataclass(frozen=True, slots=True)
class NodeArrived:
    """A process asks to be a node, or to continue as one.

    Attributes:
        connection: names its connection at this gateway.
        hello: what it says of itself.
    """

    connection: bytes
    hello: Mapping[str, Any]


@message
@dataclass(frozen=True, slots=True)
class AdmitNode:
    """The process at ``connection`` is the node ``name``. Its messages up to ``received`` were
    accepted before. ``lease_s``: seconds without a word after which it is lost.
    """

    connection: bytes
    name: str
    received: int
    fresh: bool
    lease_s: float


@message
@dataclass(frozen=True, slots=True)
class RefuseNode:
    """The process at ``connection`` is not admitted. ``again``: it may be later."""

    connection: bytes
    reason: str
    again: bool


@message
class SendToNode(NamedTuple):
    """Message ``number`` to a node, and the number of its last message that was accepted. Number 0
    carries no message.
    """

    name: str
    number: int
    received: int
    body: bytes
    store: StoreTrajectory | None = None
    """The trajectory whose data go with the message."""
    prioritise: Prioritise | None = None
    """The columns of a draw whose priorities go with the message."""


@message
class NodeSent(NamedTuple):
    """Message ``number`` of a node, whose attachments lie in their slots. Number 0 carries none."""

    name: str
    number: int
    received: int
    body: bytes


@message
@dataclass(frozen=True, slots=True)
class ConnectionsCounted:
    """Connections that the gateway has accepted since it began, and those that were refused or
    lost, by reason.
    """

    accepted: int
    refused: Mapping[str, int]


@message
@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """The connection to a node is lost; the node may come back.

    Attributes:
        name: of the node.
        connection: the one that is lost. The node may already have another one.
    """

    name: str
    connection: bytes


@message
@dataclass(frozen=True, slots=True)
class ForgetNode:
    """Close the connection of a node. ``ended``: the run has ended; else the node is lost."""

    name: str
    ended: bool


@message
class SendWeights(NamedTuple):
    """``version`` was published: nodes need it."""

    version: Version


@message
@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """Bytes so far on the link of a node, by kind, since the gateway began; the version of the
    weights that it has, and the seconds of the last round trip.
    """

    name: str
    sent: Mapping[str, int]
    received: Mapping[str, int]
    weights: Version
    round_trip_s: float
