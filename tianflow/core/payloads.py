"""Payloads: plain data that components exchange. They hold no PyTorch objects, and no method waits.

Types that are created for every trajectory or update are named tuples, because a frozen dataclass
takes twice as long to create.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

ActionKind = Literal["discrete", "multi_discrete", "box"]
Autoreset = Literal["next_step", "same_step", "disabled"]
ALIGNMENT = 64
MOST_ROWS = 2**16
"""Rows of a trajectory that a request to an inference server can name."""
PRIORITY_EPSILON = 1e-6
"""Added to every priority of a trained item (epsilon of PER, arXiv 1511.05952, section 3.3).

An item whose error is 0 would never be drawn again.
"""


class Version(NamedTuple):
    """Version of the weights: (lineage, number of completed updates). Versions are ordered by the
    pair.

    Staleness is defined within one lineage only.
    """

    lineage: int
    number: int


NO_VERSION = Version(0, -1)
"""Older than every published version."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One leaf of an observation space.

    ``name`` is the path of the leaf: "" for a plain space, else "camera" or "arm/joints" inside
    Dict or Tuple. ``shape`` and ``dtype`` describe the stored array of one environment.

    ``categories`` is the number of values of each element of a categorical leaf, else empty.
    Networks get Discrete and MultiDiscrete leaves one-hot encoded. Discrete values are stored
    zero-based.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    categories: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLeaf:
    """Form of one leaf in the environment, before it is stored.

    ``keys`` lead to it in a nested observation; a key of a Tuple is a number. ``start``, flat, is
    subtracted from the values; empty: nothing.
    """

    keys: tuple[str, ...]
    dtype: str
    start: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """Actions of a policy, as stored and as given to the environment.

    discrete: stored int64 [], zero-based; the environment gets ``value + start[0]``.
    multi_discrete: stored int64 [K], zero-based; the environment gets ``value + start``, in
        ``shape``.
    box: stored float32 ``shape``, the sampled value, unclipped; the environment gets the value
        clipped to low..high.
    """

    kind: ActionKind
    shape: tuple[int, ...]
    dtype: str
    categories: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one stored action."""
        return (
            ()
            if self.kind == "discrete"
            else (len(self.categories),)
            if self.kind == "multi_discrete"
            else self.shape
        )

    @property
    def stored_dtype(self) -> str:
        """Data type of one stored action."""
        return "float32" if self.kind == "box" else "int64"

    @property
    def mask_size(self) -> int:
        """Booleans in one action mask: the sum of categories, or 0 for a continuous action."""
        return sum(self.categories)

    @property
    def noise_size(self) -> int:
        """K, random numbers for one action: one for each category, or component of a box."""
        return sum(self.categories) if self.kind != "box" else math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Properties of a vector environment that other components need."""

    id: str
    observation: tuple[LeafSpec, ...]
    action: ActionSpec
    num_envs: int
    autoreset: Autoreset
    action_mask: bool = False
    frames_per_step: int = 1
    clips_rewards: bool = False
    """True if rewards are clipped to -1..1 for learning. Returns of episodes are not clipped."""
    source: tuple[SourceLeaf, ...] = dataclasses.field(default=(), compare=False)
    """Of each leaf of ``observation`` that the environment returns; empty if it is not known."""

    @property
    def returned(self) -> tuple[LeafSpec, ...]:
        """Leaves that the environment returns, if `source` is known. Others are added after
        them.
        """
        return self.observation[: len(self.source)]


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a trajectory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TrajectoryLayout:
    """Position of each array of one trajectory in a slot. `tianflow.core.layout` creates one per
    run.

    Fields for T steps and N environments, time first:

    ======================  ==================  =========  =====================================
    name                    shape               dtype      meaning
    ======================  ==================  =========  =====================================
    ``obs/<leaf>``          [T+1, N, *leaf]     as is      observation before action[t];
                                                           obs[length] is the bootstrap
    ``action``              [T, N, *stored]     see spec   sampled action, before any clipping
    ``log_prob``            [T, N]              float32    of the sampled action under the
                                                           acting policy; other algorithms
                                                           record other fields
                                                           (`AlgorithmSettings.recorded`)
    ``reward``              [T, N]              float32
    ``terminated``          [T, N]              bool
    ``truncated``           [T, N]              bool
    ``valid``               [T, N]              bool       False on a reset step (NEXT_STEP
                                                           autoreset) and from ``length`` on
    ``start``               [T+1, N]            bool       obs[t] is the first of an episode;
                                                           recurrent state is zero before it
    ``version``             [T]                 int64      policy version of action[t]
    ``state/<leaf>``        [N, *leaf]          float32    recurrent state before obs[0]; only for
                                                           recurrent networks. With replay
                                                           [T, N, *leaf], before every step
    ``action_mask``         [T+1, N, mask]      bool       only if the environment has masks
    ``final_obs/<leaf>``    [T, N, *leaf]       as is      last observation where terminated or
                                                           truncated; only if autoreset is
                                                           not next_step (then it is obs[t+1])
    ``return_so_far``       [T, N]              float64    discounted return accumulator; only
                                                           with return normalisation
    ``stream``              [4]                 int64      only with replay: actor, its
                                                           incarnation, number of times its
                                                           environments were created, number
                                                           of the trajectory since then (the
                                                           next number continues this one)
    ======================  ==================  =========  =====================================
    """

    steps: int
    num_envs: int
    fields: tuple[Field, ...]
    nbytes: int
    """Bytes of all fields, those of ``request`` included."""
    request: tuple[Field, ...] = ()
    """With central inference, what an actor and its inference server exchange for one row, beside
    the fields. Neither the learner nor replay reads them.

    From the actor: ``noise`` [T, N, K] float32, of all rows; ``state/<leaf>`` [N, *leaf] float32,
    before the row; ``asked/at`` float64, the time of the request in monotonic seconds. From the
    server: ``action`` [N, *stored]; the recorded fields, [N] float32 each; ``next_state/<leaf>``
    [N, *leaf] float32, after the row.
    """

    def field(self, name: str) -> Field:
        """The field called ``name``.

        Raises:
            KeyError: the layout has no such field.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)


class Grant(NamedTuple):
    """Permission to begin one trajectory, and the slot for it.

    The holder must begin with weights of ``version`` or newer.
    """

    ticket: int
    slot: int
    version: Version
    seed_epoch: int = 0
    """Deterministic mode only. When the value changes, the actor seeds environments and noise from
    it.
    """
    ahead: int = 0
    """Further tickets that each actor may request before this trajectory is complete.

    They come on top of the batch in training, so no other actor loses a credit.
    """
    place: str = ""
    """The machine where the trajectory is to lie once it is committed; "": the head."""


class Episode(NamedTuple):
    """A finished episode: undiscounted return, and length in environment steps."""

    episode_return: float
    length: int


class Trajectory(NamedTuple):
    """Descriptor of a committed trajectory. The data are in ``slot``."""

    ticket: int
    slot: int
    length: int
    """Rows written, 1..T."""
    env_steps: int
    """Valid transitions; reset steps do not count."""
    version: Version
    """Version of the oldest step."""


class Batch(NamedTuple):
    """B trajectories for the update at ``for_version``, in ticket order."""

    for_version: Version
    trajectories: tuple[Trajectory, ...]
    env_steps: int | None = None
    """Environment steps of the run when replay drew the batch; None without replay."""
    beta: float | None = None
    """Exponent of its importance weights; None without replay."""


@dataclass(frozen=True, slots=True)
class StoreTrajectory:
    """Request to a replay shard: copy the trajectory in ``slot``. ``place``: the machine where its
    data lie; "": the head.
    """

    ticket: int
    slot: int
    length: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class DrawPart:
    """Request to a replay shard: draw ``items`` items into ``slot``.

    The items go to the columns from ``first`` on. Items with a version below ``oldest`` are not
    drawn.
    """

    draw: int
    slot: int
    first: int
    items: int
    oldest: int
    """Lowest version number that may be drawn. The shard removes older items."""


@dataclass(frozen=True, slots=True)
class Prioritise:
    """Request to a replay shard: read new priorities of the items in these columns."""

    draw: int
    slot: int
    first: int
    items: int


@dataclass(frozen=True, slots=True)
class DropItems:
    """Request to a replay shard: remove all items if ``reason`` is not empty, then report the
    holdings.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class SaveItems:
    """Request to a replay shard: write all items to the file at ``path``."""

    path: str


ShardRequest = StoreTrajectory | DrawPart | Prioritise | DropItems | SaveItems


class Holdings(NamedTuple):
    """Contents of a replay shard. ``mass`` is the sum of sampling weights, p^alpha or 1 each."""

    items: int = 0
    mass: float = 0.0
    steps: int = 0
    inserted_steps: int = 0
    removed_items: int = 0
    nbytes: int = 0


class Settlement(NamedTuple):
    """Outcome of one update: the new version, the tickets that it used, and the bound in force."""

    version: Version
    tickets: tuple[int, ...]
    bound: int | None
    published: bool
    skipped: bool = False
    """True if the optimiser step was skipped because a gradient was not finite.

    The version number still increases; the weights stay those of the version before.
    """


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Returns and lengths of the complete episodes of one evaluation of ``version``."""

    version: Version
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    name: str = "main"
    """``main``, or the name of a further evaluation."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Mean of each metric of the environment over the episodes that have it, by its name."""

    @property
    def mean_return(self) -> float:
        """Mean over the episodes."""
        return sum(self.returns) / len(self.returns)


NOT_METRICS = frozenset({"version", "mean_return", "mean_reward", "episodes", "name", "t", "kind"})
"""Names beside those of metrics in the result of an evaluation, in its mark and in sinks."""

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of a host. No setting changes it, because silence is judged by
it.
"""


class Activity(NamedTuple):
    """The operation on its environments that a component is in, as of a heartbeat.

    Two equal activities in a row show one environment that works on one call.
    """

    component: str
    operation: str
    """``constructor``, ``reset``, ``step`` (a whole trajectory), ``close``, or ``inference`` (it
    waits for an inference server).
    """
    calls: int
    """Number of calls that have begun in the component's life."""
    environment: int
    """Index of the environment at work; -1 where the vector steps all of them in one call."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """Hash and size of a written state file."""

    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """A learner's state on disk, at one version. ``samples``: transitions used in training until
    then.
    """

    version: Version
    samples: int
    file: StateFile


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Position of one named tensor in the flat weight buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightsTable:
    """Names, shapes, dtypes and offsets of all published tensors: parameters, then normaliser
    state.
    """

    entries: tuple[TableEntry, ...]
    nbytes: int


def shard_file(index: int) -> str:
    """File name of replay shard ``index`` inside a checkpoint."""
    return f"replay-{index}.safetensors"


def credits_ceiling(max_staleness: int, *, publish_lag: int, batch: int) -> int:
    """C_max = (max_staleness + 1 - publish_lag) * B: credits that the staleness bound can use.

    With more credits, a trajectory could begin that exceeds the bound when it is used.

    Args:
        max_staleness: the bound, in updates.
        publish_lag: updates since the last published version.
        batch: B, trajectories per update.
    """
    return max(0, max_staleness + 1 - publish_lag) * batch


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of a cache line."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
