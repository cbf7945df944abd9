"""The contracts between the parts. Read this file to know how tianflow fits together.

Data flow: grants -> `Actor` -> trajectories (slots) -> `Learner` -> weights -> `Actor`.
PyTorch is imported for type checkers only.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from tianflow.channels.broadcast import Broadcast
    from tianflow.config.model import AlgorithmSettings, Config
    from tianflow.core.directives import Directive
    from tianflow.core.events import Event
    from tianflow.core.payloads import (
        Batch,
        EnvironmentSpec,
        Episode,
        Grant,
        Settlement,
        Trajectory,
        Version,
        WeightsTable,
    )
    from tianflow.core.statistics import RunStatistics, SinkStatistics
    from tianflow.rundir.audit_log import AuditPage

    Array = NDArray[Any]
    Tree = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """What a person may change while the run goes on: the config in force, and who is asked to
    rest.
    """

    config: Config
    bound: int | None
    """max_staleness in force, after all controllers (None: unbounded)."""
    paused: bool = False
    """A person paused the run: nobody begins anything."""
    hold_learner: bool = False
    """The learner rests at its next boundary: an evaluation is to judge exactly its newest version.
    """


class Component(Protocol):
    """One coroutine. Cancelling its task stops it. ``started`` is called once it can do its
    work.
    """

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
    """The arrays of one trajectory, as views of its slot, and the two words that are watched from
    outside.
    """

    arrays: Mapping[str, NDArray[Any]]

    def progress(self, step: int) -> None:
        """Say that the environment has been stepped ``step`` times in this trajectory."""

    def cut_requested(self) -> bool:
        """True once the ledger wants the steps made so far."""


class TrajectorySender(Protocol):
    """An actor's end of grants and trajectories. Shape 4 (leased) in, shape 1 (waits) out."""

    async def acquire(self) -> Grant:
        """Wait for a credit and a slot. EndOfChannel when the run wants no more trajectories."""

    def view(self, grant: Grant) -> SlotView: ...
    def begin(self, grant: Grant, version: Version) -> None:
        """The first step is about to be taken, with ``version``."""

    def commit(self, trajectory: Trajectory, episodes: Sequence[Episode]) -> None:
        """Hand the trajectory over. Never waits: the slot was granted. A late one is refused and
        counted.
        """

    def abort(self, grant: Grant, reason: str) -> None:
        """Give the ticket back unused; it is dropped with ``reason``."""

    def close(self) -> None:
        """Ask for nothing more: whoever waits in `acquire` gets the end. What is out may still be
        committed or aborted.
        """


class BatchSource(Protocol):
    """The learner's end. The learner pulls; nothing is ever pushed at it."""

    def next_batch(self, for_version: Version) -> Coroutine[Any, Any, Batch]:
        """Wait for B trajectories admissible at ``for_version``. EndOfChannel at the end.

        It may ask as soon as it is called: whoever calls it waits for it, too, or cancels the
        waiting.
        """

    def view(self, trajectory: Trajectory) -> Mapping[str, NDArray[Any]]: ...
    def give_back(self, batch: Batch) -> None:
        """Nothing of the batch was used; what is too old by now is dropped(expired), the rest is
        taken again later.
        """

    def opened(self, version: Version) -> None:
        """The first version of a lineage is published: grants may go out."""

    def settle(self, settlement: Settlement) -> None:
        """One update is over and its version published, or decided not to be. Its slots may be used
        again.
        """

    def published(self, version: Version) -> None:
        """The newest version was published between two updates, because a changed setting asked for
        it.
        """


class WeightsReader(Protocol):
    """Newest published weights. Never older after newer, never torn."""

    @property
    def version(self) -> Version:
        """The newest version known to have been published."""

    def read_into(self, flat: NDArray[np.uint8]) -> Version:
        """Copy the newest weights into ``flat`` and say which version they are."""

    async def wait_newer_than(self, version: Version) -> Version: ...


class WeightsWriter(Protocol):
    """The learner's end of the weights channel."""

    def publish(self, version: Version, flat: NDArray[np.uint8]) -> None: ...


class SettingsReader(Protocol):
    """Live settings: newest value only. ``key`` is its generation."""

    @property
    def value(self) -> LiveSettings: ...
    @property
    def key(self) -> int: ...
    def on_change(self, observe: Callable[[], None]) -> Callable[[], None]: ...


class EventPublisher(Protocol):
    """Shape 3: never waits; what cannot go out is dropped and counted by the reader."""

    def publish(self, event: Event) -> None: ...


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
    `load` as `act` does and gives the same up to rounding, or None where that would not be quicker.
    A rollout asks for it once, when it is made, and then steps with it.
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
        """Choose actions. ``observation``: {leaf: [N, ...]} as stored (uint8 stays uint8). No
        noise: the most probable action.
        """

    def record(self, parameters: torch.Tensor, action: torch.Tensor) -> Tree:
        """What `AlgorithmSettings.recorded` names, once per trajectory: [T, N, P], [T, N, *stored]
        -> {name: [T, N]}.

        Of actor-critic algorithms, ``log_prob``: log-probabilities of the stored actions.
        """

    def place(self, index: int, count: int) -> None:
        """Which actor of how many rolls out next, for those that explore differently. Told before
        every trajectory.

        The actors of a host take turns with one policy, so it keeps nothing of a trajectory but
        what `act` gives and is given.
        """


@runtime_checkable
class ActsInBfloat16(Protocol):
    """A `Policy` that can do what ``actors.precision = "bf16"`` asks for."""

    def act_in_bfloat16(self) -> None:
        """Compute `Policy.act` in bfloat16 from now on; what it gives stays float32. Called once,
        before a rollout has the policy.
        """


@runtime_checkable
class NamesParameters(Protocol):
    """A `Policy` that can say what its parameters are. ``tianflow export`` asks; those of others
    are called ``parameters`` there.
    """

    def named(self, parameters: torch.Tensor) -> Tree:
        """What ``parameters`` [N, P] consist of: {name: [N, ...]}, e.g. ``logits``."""


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
    """[n], one for each item of a replayed batch; None if the algorithm has none, or nothing was
    learned from the batch.
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


class ReplayAlgorithm(Algorithm, Protocol):
    """The learner's half of an algorithm that learns from replay."""

    def set_settings(self, settings: AlgorithmSettings, updates: int) -> None:
        """The settings in force, and how many updates were made, for what follows a schedule."""


class AlgorithmFactory(Protocol):
    """What an algorithm's entry point names: one class or module with these."""

    settings: type

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> Policy: ...
    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> Algorithm: ...


# Control
# --------------------------------------------------------------------------------------------------


class RunControl(Protocol):
    """A run as the service, the CLI screen and the metrics see it. Called on the coordinator's
    loop.
    """

    id: str
    directory: Path
    events: Broadcast
    sinks: dict[str, SinkStatistics]
    """By name; whoever feeds them counts here."""

    @property
    def config(self) -> Config:
        """Settings in force, live changes included."""

    @property
    def generation(self) -> int:
        """Generation of the settings in force."""

    @property
    def state(self) -> str: ...
    @property
    def alive(self) -> bool:
        """True while the coordinator's own tick is young."""

    def statistics(self) -> RunStatistics: ...
    def change(self, changes: Mapping[str, Mapping[str, object]], *, source: str) -> int:
        """Put live settings in force, whole or not at all, by section; audited. The new generation.

        Raises:
            ConfigError: a value or key is refused; nothing changed.
            StateConflictError: the run has ended or is ending.
        """

    def pause(self, *, source: str) -> str:
        """Actions answer the state they lead to; repeating one is not an error. StateConflictError
        after the end.
        """

    def resume(self, *, source: str) -> str: ...
    def drain(self, *, source: str) -> str: ...
    def stop(self, *, source: str) -> str: ...
    def request_checkpoint(self, *, source: str) -> str: ...
    @property
    def audited(self) -> int:
        """How many changes and actions there were in this process, those that `audit` no longer has
        included.
        """

    def audit(self) -> Sequence[Mapping[str, object]]:
        """The newest changes and actions, oldest first: time (ISO 8601), source, action, old, new.
        The file has all of them.
        """

    async def read_audit(self, *, before: int | None, limit: int) -> AuditPage:
        """A page of all changes and actions, those before a resume included. See
        `tianflow.rundir.audit_log.read_page`.
        """

    def checkpoints(self) -> Sequence[Mapping[str, object]]:
        """Checkpoints on disk, newest first: name, version, env_steps, bytes, created."""
