"""The contracts between the parts, all in one file. Read it to know how tianflow fits together.

Data flow: grants -> `Actor` -> trajectories (slots) -> `Learner` -> weights -> `Actor`.
Sections: Control, Sinks, Components, Channels, Learning, Replay, Hosts, Launching.
PyTorch and the upper packages are imported for type checkers only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from tianflow.algorithms.common.ranks import Ranks
    from tianflow.channels.arena import Arena
    from tianflow.channels.broadcast import Broadcast
    from tianflow.channels.messages import ShardAnswer
    from tianflow.config.model import Config
    from tianflow.core.directives import Directive
    from tianflow.core.events import Event
    from tianflow.core.payloads import (
        Activity,
        Batch,
        EnvironmentSpec,
        Episode,
        Evaluation,
        Grant,
        SavedState,
        Settlement,
        ShardRequest,
        Trajectory,
        TrajectoryLayout,
        Version,
        WeightsTable,
    )
    from tianflow.core.program import HostPlan, HostSpec, JobState, LauncherCapabilities
    from tianflow.core.statistics import (
        ComponentStatistics,
        NodeStatistics,
        RunStatistics,
        SinkStatistics,
    )
    from tianflow.errors import RunError
    from tianflow.exchange.exchange import Exchange
    from tianflow.exchange.shards import ShardEnd
    from tianflow.rundir.audit_log import AuditPage
    from tianflow.rundir.history import Row

    Array = NDArray[Any]
    Tree = Mapping[str, torch.Tensor]


# Control: a run, for people and programs that steer it
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """What may change while the run continues: the config in force, and what has to rest."""

    config: Config
    bound: int | None
    """max_staleness in force, after all controllers (None: unbounded)."""
    paused: bool = False
    """The run is paused: no component begins new work."""
    hold_learner: bool = False
    """The learner rests at its next boundary: an evaluation is to judge exactly its newest version.
    """
    generation: int = 0
    """Number of changes of all the rest. A hold of the learner does not count: it
    would refuse the change of a client that has read the settings before it.
    """


class RunControl(Protocol):
    """A run as the service, the screen and the metrics see it. Called on the coordinator's loop."""

    id: str
    directory: Path
    events: Broadcast
    sinks: dict[str, SinkStatistics]
    """By name; the recorder updates it."""

    @property
    def config(self) -> Config:
        """Settings in force, live changes included."""

    @property
    def generation(self) -> int:
        """Generation of the settings in force."""

    @property
    def state(self) -> str:
        """See `RunStatistics.state`."""

    @property
    def alive(self) -> bool:
        """True while the coordinator's own tick is young."""

    def statistics(self) -> RunStatistics:
        """All numbers, at one moment."""

    def change(self, changes: Mapping[str, Mapping[str, object]], *, source: str) -> int:
        """Put live settings in force, by section: all of them, or none. Audited. The new
        generation.

        Raises:
            ConfigError: a value or key is refused; nothing changed.
            StateConflictError: the run has ended or is ending.
        """

    def pause(self, *, source: str) -> str:
        """Begin nothing new until `resume`.

        Every action returns the state it leads to. A repeated action is not an error. After the end
        of the run an action raises StateConflictError.
        """

    def resume(self, *, source: str) -> str:
        """Continue after `pause`."""

    def drain(self, *, source: str) -> str:
        """Begin nothing new, train on what is there as far as it fills batches, then end."""

    def stop(self, *, source: str) -> str:
        """End with a checkpoint; open tickets are dropped(stopped)."""

    def request_checkpoint(self, *, source: str) -> str:
        """Write a checkpoint at the learner's next boundary."""

    @property
    def audited(self) -> int:
        """Number of changes and actions of this process, those that `audit` no longer holds
        included.
        """

    def audit(self) -> Sequence[Mapping[str, object]]:
        """The newest changes and actions, oldest first: time (ISO 8601), source, action, old, new.
        The file holds all of them.
        """

    async def read_audit(self, *, before: int | None, limit: int) -> AuditPage:
        """A page of all changes and actions, those before a resume included. See
        `tianflow.rundir.audit_log.read_page`.
        """

    def checkpoints(self) -> Sequence[Mapping[str, object]]:
        """Checkpoints on disk, newest first: name, version, env_steps, bytes, created."""


# Sinks: where the history of a run goes
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run of a sink. ``config`` holds every setting at the start, ready for JSON."""

    id: str
    directory: Path
    config: Mapping[str, Any]


class Sink(Protocol):
    """Receives the history of a run. An entry point of ``tianflow.sinks`` names a factory, and
    ``factory(run=SinkRun, **kwargs)`` makes it, in a thread of its own, which also uses and closes
    it.

    A sink may block. If it raises, it is closed and receives no more rows. A factory may name the
    ``packages`` that it imports and the ``extra`` that installs them; a run checks for them before
    it starts.
    """

    def write(self, row: Row) -> None:
        """Write one row; see `tianflow.rundir.history.HistoryRow`. The times of rows differ, but a
        resumed run may go back in steps.
        """

    def close(self) -> None:
        """Close after the last row."""


# Components
# --------------------------------------------------------------------------------------------------


class Component(Protocol):
    """One coroutine. Cancelling its task stops it. It calls ``started`` once it works."""

    name: str

    async def run(self, started: Callable[[], None]) -> None: ...
    def statistics(self) -> object: ...


class Controller(Protocol):
    """A balance controller: a pure state machine. No clock, no I/O; time comes in with the
    event.
    """

    def handle(self, event: Event) -> Iterable[Directive]: ...


# Channels
# --------------------------------------------------------------------------------------------------


class SlotView(Protocol):
    """The arrays of one trajectory, as views of its slot, and the two words that the coordinator
    watches.
    """

    arrays: Mapping[str, NDArray[Any]]
    number: int
    """Of the slot."""

    @property
    def request(self) -> Mapping[str, NDArray[Any]]:
        """With central inference, the arrays of a request (`TrajectoryLayout.request`)."""

    def progress(self, step: int) -> None:
        """The environment has taken ``step`` steps in this trajectory."""

    def cut_requested(self) -> bool:
        """True once the ledger wants the steps made so far."""

    def ask(self, row: int, place: int) -> None:
        """Request the actions of ``row``, for the host at ``place`` among the doorbells."""

    def answered(self) -> bool:
        """True once an inference server has answered the request."""

    def answer_version(self) -> Version:
        """The version that computed the answer."""


class Bell(Protocol):
    """Wakes the compute thread of one host."""

    def ring(self) -> None:
        """Wake it. Never waits. From any thread or process."""

    def wait(self, until: float | None = None) -> None:
        """Wait for a ring since the last `wait`, or until ``until`` (`time.monotonic`)."""


class SlotOwner(Protocol):
    """The owner of the memory of slots. A launcher makes it, and `close` frees the memory."""

    @property
    def arena(self) -> Arena:
        """Slots of trajectories, as the coordinator sees them."""

    @property
    def draws(self) -> Arena | None:
        """With replay, slots of draws."""

    @property
    def bells(self) -> Sequence[Bell]:
        """See `HostTransport.bells`."""

    def add_slots(self, count: int) -> None:
        """Allocate ``count`` more slots. TianflowError, and nothing changes, if memory is full."""

    def close(self) -> None:
        """Free the memory. Idempotent."""


class TrajectorySender(Protocol):
    """An actor's end of grants and trajectories. Shape 4 (leased) in, shape 1 (waits) out."""

    async def acquire(self) -> Grant:
        """Wait for a credit and a slot. EndOfChannel when the run wants no more trajectories."""

    def view(self, grant: Grant) -> SlotView: ...
    def begin(self, grant: Grant, version: Version) -> None:
        """The actor takes the first step, with ``version``."""

    def commit(self, trajectory: Trajectory, episodes: Sequence[Episode]) -> None:
        """Hand the trajectory over. Never waits: the slot was granted. A late one is refused and
        counted.
        """

    def abort(self, grant: Grant, reason: str) -> None:
        """Give the ticket back unused; it is dropped with ``reason``."""

    def close(self) -> None:
        """Request nothing more: a waiting `acquire` gets the end. Granted tickets may still be
        committed or aborted.
        """


class BatchSource(Protocol):
    """The learner's end. The learner pulls; nothing is pushed at it."""

    def next_batch(self, for_version: Version) -> Coroutine[Any, Any, Batch]:
        """Wait for B trajectories admissible at ``for_version``. EndOfChannel at the end.

        The request may leave at the call: the caller has to await it, or cancel the wait.
        """

    @property
    def arena(self) -> Arena:
        """Where the trajectories lie: slots of trajectories, or of draws."""

    def view(self, trajectory: Trajectory) -> Mapping[str, NDArray[Any]]: ...
    def give_back(self, batch: Batch) -> None:
        """Nothing of the batch was used. Expired trajectories are dropped(expired), the others are
        taken again later.
        """

    def opened(self, version: Version) -> None:
        """The first version of a lineage is published: grants may go out."""

    def settle(self, settlement: Settlement) -> None:
        """One update is over and its version published, or skipped. Its slots are free."""

    def published(self, version: Version) -> None:
        """The newest version was published between two updates, because a changed setting asked for
        it.
        """


class ShardPort(Protocol):
    """The exchange's way to a replay shard. Requests arrive in the order they were sent."""

    @property
    def place(self) -> str:
        """The machine on which the shard runs; "": the head."""

    def ask(self, request: ShardRequest) -> None: ...


class WeightsReader(Protocol):
    """Newest published weights. Never older after newer, never torn."""

    @property
    def version(self) -> Version:
        """The newest version known to have been published."""

    def read_into(self, flat: NDArray[np.uint8]) -> Version:
        """Copy the newest weights into ``flat``, and return their version."""

    async def wait_newer_than(self, version: Version) -> Version: ...


class WeightsWriter(Protocol):
    """The learner's end of the weights channel."""

    def publish(self, version: Version, flat: NDArray[np.uint8]) -> None: ...


class WeightsChannel(WeightsReader, WeightsWriter, Protocol):
    """Both ends of the weights channel, in one host process."""

    def announce(self, version: Version) -> None:
        """``version`` was published: nothing older is read from now on."""


class SettingsReader(Protocol):
    """Live settings: newest value only. ``key`` grows with each value."""

    @property
    def value(self) -> LiveSettings: ...
    @property
    def key(self) -> int: ...
    def on_change(self, observe: Callable[[], None]) -> Callable[[], None]:
        """Call ``observe`` after every change. Returns the function that ends that."""


class EventPublisher(Protocol):
    """Shape 3: never waits; what cannot leave is dropped, and the reader counts it."""

    def publish(self, event: Event) -> None: ...


class MessageLink(Protocol):
    """One end of the connection between the coordinator and a host.

    It carries the classes of `tianflow.channels.messages`, all of them and in order, until the
    other end is gone.
    """

    def send(self, message: object) -> None:
        """Send ``message``. Never waits. Does nothing on a closed link."""

    def send_threadsafe(self, message: object) -> None:
        """`send`, from another thread."""

    def send_event(self, event: Event) -> None:
        """Send an event, or drop it when the other side is behind."""

    def push(self) -> None:
        """Let what was sent leave now, not at the end of this turn of the loop."""

    async def flush(self) -> None:
        """Wait until everything sent has left, or the link is lost."""

    def drain(self) -> None:
        """Handle everything that has arrived."""

    def close(self) -> None:
        """Close this end; what was not sent is lost. Idempotent."""


class OpenLink(Protocol):
    """A function that opens one end of a link."""

    def __call__(
        self,
        *,
        handle: Callable[[object], None],
        closed: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> MessageLink:
        """``handle`` receives every message; ``closed`` is called once when the other end is gone;
        ``failed`` receives what ``handle`` raises, and BrokenChannelError for a malformed message.
        """


@dataclass(frozen=True, slots=True)
class Connection:
    """A new connection to a host that is about to start."""

    open_link: OpenLink
    """Opens the coordinator's end."""
    descriptors: tuple[int, ...]
    """What the host process inherits, in this order; its numbers may differ."""
    close: Callable[[], None]
    """Closes the coordinator's copies, once the host has inherited the descriptors."""


class Connects(Protocol):
    """Makes the connections of hosts that are about to start."""

    @property
    def address(self) -> str:
        """What a host opens its side with: ``NAME://REST``. ``NAME`` is an entry point of
        ``tianflow.transports``, or ``module:attribute`` of a class with `attach`.
        """

    def connect(self) -> Connection: ...


class Transport(SlotOwner, Connects, Protocol):
    """How a run shares memory and exchanges messages with its host processes: the coordinator's
    side. `HostTransport` is the other side.
    """


class HostTransport(Protocol):
    """A host's side of a `Transport`."""

    @classmethod
    def attach(
        cls,
        address: str,
        descriptors: Sequence[int],
        *,
        layout: TrajectoryLayout,
        draws: TrajectoryLayout | None,
    ) -> Self:
        """Open this side, with the descriptors of `Connection`, in their order."""

    @property
    def arena(self) -> Arena:
        """Slots of trajectories."""

    @property
    def draws(self) -> Arena | None:
        """With replay, slots of draws."""

    @property
    def bells(self) -> Sequence[Bell]:
        """With central inference, the doorbells of the run: those of inference servers, then those
        of the hosts of actors (`HostSpec.bell`).
        """

    @property
    def open_link(self) -> OpenLink:
        """Opens the host's end of its link."""

    def open_weights(self, nbytes: int) -> WeightsChannel:
        """The weights channel for flat buffers of ``nbytes``. BrokenChannelError if the run has
        weights of another size.
        """


# Learning
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ActorStep:
    """What a policy answers to one observation.

    ``action``: [N, *stored] torch tensor (int64 zero-based, or float32 unclipped). ``parameters``:
    [N, P] float32, what the action distribution was computed from (logits, or means and log
    standard deviations side by side). ``state``: next recurrent state.
    """

    action: torch.Tensor
    parameters: torch.Tensor
    state: Tree


class ArrayStep(Protocol):
    """`Policy.act` with noise, on NumPy arrays, for a policy without memory and without masks."""

    size: int
    """P, parameters of one action."""

    def __call__(
        self,
        observation: Mapping[str, NDArray[Any]],
        noise: NDArray[Any],
        parameters: NDArray[Any],
        action: NDArray[Any],
    ) -> None:
        """{leaf: [N, ...]} and [N, K] -> into ``parameters`` [N, P] and ``action`` [N, *stored].
        ``noise`` is overwritten.
        """

    def record(self, parameters: NDArray[Any], action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        """`Policy.record`: [T, N, P] and [T, N, *stored] -> {name: [T, N]}."""


class Policy(Protocol):
    """The actor's half of an algorithm. Never constructs an optimiser.

    It may have ``on_arrays(num_envs)`` beside the methods here: an `ArrayStep`, which follows
    `load` as `act` does and gives the same up to rounding, or None where that would not be faster.
    A rollout calls it once, when it is made, and then steps with it.
    """

    table: WeightsTable
    """Where each tensor lies in the flat buffer."""

    def load(self, flat: NDArray[np.uint8]) -> None:
        """Take all tensors from a flat weight buffer laid out by the algorithm's table."""

    def initial_state(self, num_envs: int) -> Tree:
        """Zero recurrent state, {name: [N, ...]}; empty for networks without memory."""

    def noise(self, steps: int, num_envs: int, generator: np.random.Generator) -> torch.Tensor:
        """Sampling noise for ``steps`` steps, drawn at once: [steps, N, K], one number for each
        logit or component of an action.
        """

    def act(
        self,
        observation: Tree,
        state: Tree,
        noise: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> ActorStep:
        """Choose actions. ``observation``: {leaf: [N, ...]} as stored (uint8 stays uint8). Without
        noise: the most probable action.
        """

    def record(self, parameters: torch.Tensor, action: torch.Tensor) -> Tree:
        """What `AlgorithmSettings.recorded` names, once per trajectory: [T, N, P], [T, N, *stored]
        -> {name: [T, N]}.

        For actor-critic algorithms, ``log_prob``: log-probabilities of the stored actions.
        """

    def place(self, index: int, count: int) -> None:
        """Actor ``index`` of ``count`` rolls out next, for policies that explore differently per
        actor. Called before every trajectory.

        The actors of a host take turns with one policy, so the policy stores nothing of a
        trajectory except what `act` takes and gives.
        """


@runtime_checkable
class ActsInBfloat16(Protocol):
    """A `Policy` that supports ``actors.precision = "bf16"``."""

    def act_in_bfloat16(self) -> None:
        """Compute `Policy.act` in bfloat16 from now on; its results stay float32. Called once,
        before a rollout has the policy.
        """


@runtime_checkable
class NamesParameters(Protocol):
    """A `Policy` that names its parameters for ``tianflow export``. Those of other policies are
    called ``parameters`` there.
    """

    def named(self, parameters: torch.Tensor) -> Tree:
        """The parts of ``parameters`` [N, P]: {name: [N, ...]}, e.g. ``logits``."""


@dataclass(frozen=True, slots=True)
class LearnerBatch:
    """B trajectories side by side, on the learner's device, owned by the learner.

    ``arrays``: the fields of `TrajectoryLayout`, time first, [T(+1), B*N, ...] (``state/*`` is
    [B*N, ...]; ``version`` is [T, B]). Rows past a trajectory's length have ``valid`` False and
    hold finite values.
    """

    arrays: Tree


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one update did. ``finite`` False: the optimiser step was skipped. ``statistics``:
    losses, KL, ESS, … as floats.
    """

    samples: int
    finite: bool
    statistics: Mapping[str, float]
    priorities: NDArray[np.float32] | None = None
    """[n], one for each item of a replayed batch; None if the algorithm has no priorities, or
    learned nothing from the batch.
    """


class Algorithm(Protocol):
    """The learner's half: parameters, optimiser, normalisers, and one update."""

    def flat(self) -> NDArray[np.uint8]:
        """All published tensors as one flat byte buffer on the CPU (a view that the next update
        overwrites).
        """

    def step(self, batch: LearnerBatch, should_stop: Callable[[], bool] = ...) -> StepResult:
        """One whole update (all epochs and minibatches)."""

    def set_live(self, learning_rate: float, entropy_cost: float) -> None: ...
    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Everything a resumed run needs, as named arrays (copies)."""

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None: ...


@runtime_checkable
class ExplainsDifference(Protocol):
    """An `Algorithm` that can look for the cause if its policy differs from that of its actors."""

    def explain_difference(self, batch: LearnerBatch) -> str:
        """The likely cause, as a phrase, found with the observations of ``batch``."""


@runtime_checkable
class MeasuresDivergence(Protocol):
    """An `Algorithm` that supports ``weights.publish = "divergence"``. Its settings declare it
    (`AlgorithmSettings.measures_divergence`).
    """

    def retain_policy(self) -> None:
        """Copy the current policy: it is published now. Called before every publication."""

    def divergence(self, batch: LearnerBatch, states: int) -> float:
        """Mean KL divergence per state in nats, KL(retained || current), on at most ``states``
        states of ``batch``. Both policies are evaluated on the same states; equal weights give 0.
        """


@runtime_checkable
class SplitsOverRanks(Protocol):
    """An `Algorithm` that several processes can compute together (``learner.ranks``). Its settings
    declare it (`AlgorithmSettings.splits_over_ranks`).
    """

    def join(self, ranks: Ranks) -> None:
        """Train on a part of each batch from now on, beside other ``ranks``. Their states are
        equal. `Algorithm.step` has to add up counts, statistics and gradients over the ranks, and
        returns the same result on each, except for priorities.
        """


@runtime_checkable
class TransfersParameters(Protocol):
    """An `Algorithm` whose parameters another run can start with (``run.init_from``)."""

    @property
    def tables(self) -> Mapping[str, WeightsTable]:
        """Names, shapes and places of what a new run takes from a checkpoint, by the array of
        `Algorithm.state_dict` that holds them. The published weights are "flat".
        """

    def follow_parameters(self) -> None:
        """Make state that depends on the parameters, such as target networks, agree with them. They
        were replaced by those of a checkpoint.
        """


@runtime_checkable
class FollowsSettings(Protocol):
    """An `Algorithm` that reads settings in force before each update, beside those of
    `Algorithm.set_live`.
    """

    def set_settings(self, settings: Any, updates: int) -> None:
        """The settings in force, with a number for every schedule, and the number of updates so
        far.
        """


class ReplayAlgorithm(Algorithm, FollowsSettings, Protocol):
    """The learner's half of an algorithm that learns from replay."""


class AlgorithmFactory(Protocol):
    """What an algorithm's entry point names: one class or module with these."""

    settings: type

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec, device: torch.device = ...) -> Policy:
        """A policy on ``device``; by default, and for an algorithm without this argument, on the
        CPU. Inference servers ask for other devices.
        """

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> Algorithm: ...


# Hosts
# --------------------------------------------------------------------------------------------------


class Ends(Protocol):
    """The ends of the channels that the components of a host get, in any transport."""

    def sender(self, holder: str) -> TrajectorySender: ...
    def source(self) -> BatchSource: ...
    def shard_end(self, index: int) -> ShardEnd:
        """The end of replay shard ``index``."""

    @property
    def arena(self) -> Arena:
        """Slots of trajectories."""

    @property
    def bells(self) -> Sequence[Bell]:
        """See `HostTransport.bells`."""

    def weights_reader(self, nbytes: int) -> WeightsReader: ...
    def weights_writer(self, nbytes: int) -> WeightsWriter: ...
    async def newest_weights(self, version: Version) -> None:
        """Wait until weights at least as new as ``version`` can be read."""

    @property
    def settings(self) -> SettingsReader: ...
    @property
    def events(self) -> EventPublisher: ...


class HostReports(Protocol):
    """What a host reports to the coordinator, in any transport."""

    def component_started(self, name: str) -> None:
        """A component works."""

    def component_ended(self, name: str) -> None:
        """A component has ended, as it was asked to, while the run continues."""

    def report(self, statistics: Sequence[ComponentStatistics]) -> None:
        """The newest numbers of components."""

    def fail(self, error: RunError) -> None:
        """The run cannot continue because of ``error``."""


class HostEnd(HostReports, Protocol):
    """What a host sends to the coordinator, in any transport."""

    def heartbeat(self, activities: tuple[Activity, ...]) -> None:
        """The host's loop works. Called every `HEARTBEAT_S`."""


class LearnerPort(Protocol):
    """The coordinator's way to the learner. BrokenChannelError once its host is gone."""

    async def save(self, staged: Path) -> SavedState:
        """Write the whole state, as of the next boundary, into ``staged``."""

    async def rest(self) -> Version:
        """Publish the newest version once the learner is at a boundary; it is held there."""


class EvaluatorPort(Protocol):
    """The coordinator's way to the evaluator. BrokenChannelError once its host is gone."""

    async def load(self, at_least: Version) -> Version:
        """Load the newest version, which is ``at_least`` this one."""

    async def evaluate(self, at_least: Version, name: str) -> Evaluation:
        """Play the evaluation ``name`` with the version that was loaded last. A new process has
        none, and loads the newest one, which is ``at_least`` this one.
        """


class HostHandle(Protocol):
    """A running host, as the supervisor sees it."""

    async def wait(self) -> str:
        """Wait until the host is gone and cannot write any more. How it ended, in words."""

    def ask_to_stop(self) -> None:
        """Ask the host to flush and leave."""

    def kill(self) -> None:
        """End the host now."""

    def reconcile(self, host: HostSpec) -> None:
        """Run exactly the components of ``host``."""

    @property
    def started(self) -> bool:
        """True once all its components work."""

    @property
    def silent_for(self) -> float:
        """Seconds since the last sign of life."""

    @property
    def activities(self) -> Sequence[Activity]:
        """What its components do with their environments, as of the last heartbeat."""


@runtime_checkable
class InProcess(Protocol):
    """A `HostHandle` whose host is a process of its own has this, too."""

    @property
    def pid(self) -> int:
        """Of the process."""


@runtime_checkable
class OnNode(Protocol):
    """A `HostHandle` whose host runs on another machine has this, too."""

    @property
    def node(self) -> str:
        """Name of the node."""

    @property
    def cause(self) -> str:
        """Why the host ended, or is about to, if its node is the reason: ``node_lost``,
        ``node_left`` or ``moved``; else empty.
        """


class HostProcess(Protocol):
    """A process that runs a host, as its launcher started it; it leads a process group."""

    @property
    def pid(self) -> int:
        """The process, and its process group; 0: it runs on another machine."""

    async def wait(self) -> int:
        """Wait until the process, and every process of its group, is gone. Its exit status, or
        minus the signal that ended it.
        """

    def kill(self) -> None:
        """Kill the process and its group, stopped or not. Does nothing once it is gone."""


StartProcess: TypeAlias = Callable[[str, bytes, Sequence[int]], Awaitable[HostProcess]]
"""Starts the process of a host: ``start_process(name, payload, descriptors)``.

- The process inherits ``descriptors``, in any numbers. The caller closes its own afterwards.
- The process runs `tianflow.hosts.main.main` with the payload and its own numbers, in the order of
  ``descriptors``. ``python -m tianflow.hosts NUMBER ...`` does that with the payload from standard
  input, which has to end.
- The exit status of the process is what `main` returns.
- The environment of the process is that of `tianflow.launchers.remote.host_environment`.
- The launcher ends the processes that are left when it is cancelled, those that are just being
  started too. A process also ends by itself when this process is gone.
- Raises RunError if the process cannot be started.
"""


# Launching
# --------------------------------------------------------------------------------------------------


class NodesView(Protocol):
    """The nodes of a run."""

    @property
    def arrived(self) -> int:
        """Processes that asked to be nodes, or to continue as one."""

    @property
    def refused(self) -> int:
        """Processes that were not admitted, or could not make the environment."""

    @property
    def connections(self) -> int:
        """Connections to the gateway, and to nodes that listen for others."""

    @property
    def connections_refused(self) -> Mapping[str, int]:
        """Of them, those that were refused, closed or lost, by reason
        (`tianflow.core.statistics.CONNECTION_REFUSALS`).
        """

    def statistics(self) -> Mapping[str, NodeStatistics]:
        """The nodes now, by name."""


class HostInbox(HostReports, EventPublisher, Protocol):
    """Where a launcher delivers what the hosts of a run report."""

    def events_lost(self, count: int) -> None:
        """``count`` events were lost on their way here."""

    def episodes_finished(self, holder: str, episodes: Sequence[Episode]) -> None:
        """Episodes ended in a committed trajectory."""

    def register_learner(self, port: LearnerPort) -> None:
        """The learner is reached by ``port``, until its host is lost."""

    def register_evaluator(self, port: EvaluatorPort) -> None:
        """The evaluator is reached by ``port``, until its host is lost."""

    def register_nodes(self, nodes: NodesView) -> None:
        """The run has nodes, until it ends."""

    def shard_opened(self, index: int, incarnation: int, port: ShardPort) -> None:
        """A replay shard works, in this incarnation of its host."""

    def shard_answered(self, index: int, incarnation: int, answer: ShardAnswer) -> None:
        """A replay shard has answered a request."""


HostStarter: TypeAlias = Callable[["HostSpec", int], Awaitable[HostHandle]]
"""Starts a host. The number is its incarnation: how often the run has started it before."""


class RunView(Protocol):
    """What a launcher may use of a run."""

    id: str
    directory: Path
    """Where the run stores what outlives it."""
    spec: EnvironmentSpec
    """Of the environments."""

    @property
    def inbox(self) -> HostInbox: ...
    @property
    def settings(self) -> SettingsReader: ...
    @property
    def exchange(self) -> Exchange: ...
    async def plan_host(self, host: HostSpec, incarnation: int) -> HostPlan:
        """What ``host`` builds its components from, if it starts now."""

    async def run(self, start_host: HostStarter) -> None:
        """Run until the end. ``start_host`` starts one host; it is called for every host of the
        program, and again for each one that dies.
        """


class Launcher(Protocol):
    """Runs the hosts of a program. An entry point of ``tianflow.launchers`` names its class, which
    is called without arguments.
    """

    capabilities: LauncherCapabilities

    def prepare(self) -> None:
        """Import what is slow to import. Called before a loop runs."""

    def slots(
        self, *, config: Config, layout: TrajectoryLayout, draws: TrajectoryLayout | None
    ) -> SlotOwner:
        """Make the memory of slots. ``draws``: with replay, the layout of a draw."""

    async def launch(self, run: RunView, slots: Any) -> None:
        """Run ``run`` to its end, with hosts of this launcher and the ``slots`` that it made.

        When it returns, or is cancelled, no process, task or socket of a host is left.
        """


# Batch systems
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A run that a batch system is to start."""

    config: Config
    name: str
    """Of the run, and of its directory in ``runs_dir``."""
    runs_dir: Path
    """Absolute. All machines of the job see it."""
    resume: str | None
    """Run or checkpoint to continue from; None: a new run."""
    arguments: tuple[str, ...] = ()
    """Further arguments of ``tianflow train``."""


class BatchJob(Protocol):
    """A run as a job of a batch system. Its text names job and run."""

    @property
    def script(self) -> str:
        """What is submitted."""

    def submit(self) -> str:
        """Submit the job. Its number.

        Raises:
            ConfigError: the batch system is not here, or refuses the job.
            RunError: an earlier job of the run is active.
        """

    @property
    def directory(self) -> Path:
        """Directory of the run."""

    @property
    def outputs(self) -> tuple[Path, Path]:
        """Files that get standard output and standard error of the run."""

    def state(self) -> JobState:
        """The state now."""

    def cancel(self, *, now: bool) -> None:
        """End the job, with a last checkpoint unless ``now``."""


@runtime_checkable
class SubmitsRuns(Protocol):
    """A `Launcher` that gives whole runs to a batch system, instead of running them here."""

    def job(self, order: RunOrder) -> BatchJob:
        """The job of ``order``. Nothing is written or submitted. Raises ConfigError."""
