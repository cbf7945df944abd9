"""Nouns: what moves between components. Plain data, no behaviour that waits, no PyTorch.

What is made for every trajectory or update is a tuple, which takes half as long as a frozen
dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

ActionKind = Literal["discrete", "multi_discrete", "box"]
Autoreset = Literal["next_step", "same_step", "disabled"]
ALIGNMENT = 64


class Version(NamedTuple):
    """(lineage, number of completed updates). Readers order by the pair; staleness exists inside a
    lineage only.
    """

    lineage: int
    number: int


NO_VERSION = Version(0, -1)
"""Older than everything that was ever published."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One leaf of an observation: ``name`` is its path ("" for a plain space, "camera",
    "arm/joints" inside Dict or Tuple).

    ``shape`` and ``dtype`` are those of the stored array for one environment. ``categories`` is the
    number of values of each element when the leaf is categorical (Discrete, MultiDiscrete: one-hot
    on the way into a network; Discrete values are stored zero-based), else empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    categories: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What a policy may do.

    discrete: stored int64 [], zero-based; the environment gets ``value + start[0]``.
    multi_discrete: stored int64 [K], zero-based; the environment gets ``value + start``, in
    ``shape``.
    box: stored float32 ``shape``, the sampled value, unclipped; the environment gets it clipped to
    low..high.
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
        """dtype of a stored action."""
        return "float32" if self.kind == "box" else "int64"

    @property
    def mask_size(self) -> int:
        """Booleans in one action mask: the sum of categories (0 when the action is continuous)."""
        return sum(self.categories)


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What the rest of the system needs to know of a vector environment."""

    id: str
    observation: tuple[LeafSpec, ...]
    action: ActionSpec
    num_envs: int
    autoreset: Autoreset
    action_mask: bool = False
    frames_per_step: int = 1


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
    """Where the arrays of one trajectory lie in a slot. Made once per run, by
    `tianflow.core.layout`.

    With T steps, N environments, the fields are (time first):

    ======================  ==================  =========
    ==========================================================
    name                    shape               dtype      meaning
    ======================  ==================  =========
    ==========================================================
    ``obs/<leaf>``          [T+1, N, *leaf]     as is      obs[t] is what action[t] was chosen from;
    obs[length] bootstraps
    ``action``              [T, N, *stored]     see spec   the sampled action, before any clipping
    ``log_prob``            [T, N]              float32    of the sampled action under the acting
    policy; other algorithms record
                                                           other fields instead
                                                           (`AlgorithmSettings.recorded`)
    ``reward``              [T, N]              float32
    ``terminated``          [T, N]              bool
    ``truncated``           [T, N]              bool
    ``valid``               [T, N]              bool       False on a reset step (NEXT_STEP
    autoreset) and past ``length``
    ``start``               [T+1, N]            bool       obs[t] is the first of an episode
    (recurrent state is zero before it)
    ``version``             [T]                 int64      number of the policy version that chose
    action[t]
    ``state/<leaf>``        [N, *leaf]          float32    recurrent state before obs[0]; only for
    recurrent networks. With
                                                           replay [T, N, *leaf], before every step
    ``action_mask``         [T+1, N, mask]      bool       only if the environment gives one
    ``final_obs/<leaf>``    [T, N, *leaf]       as is      the true last observation where
    terminated or truncated; only when
                                                           autoreset is not next_step (there
                                                           obs[t+1] is the true one)
    ``return_so_far``       [T, N]              float64    discounted return accumulator; only with
    return normalisation
    ``stream``              [4]                 int64      only with replay: actor, its incarnation,
    how often its environments were
                                                           made, number of the trajectory since; the
                                                           next one continues this one
    ======================  ==================  =========
    ==========================================================
    """

    steps: int
    num_envs: int
    fields: tuple[Field, ...]
    nbytes: int

    def field(self, name: str) -> Field:
        """The field called ``name``; KeyError if there is none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)


class Grant(NamedTuple):
    """Permission to begin one trajectory, and the memory for it. Begin nothing with weights older
    than ``version``.
    """

    ticket: int
    slot: int
    version: Version
    seed_epoch: int = 0
    """Deterministic mode: when it differs from the last one seen, the actor re-seeds environments
    and noise from it.
    """
    ahead: int = 0
    """So many more each actor could hold, beside the batch that is trained on: they may be asked
    for before this trajectory is done.
    """


class Episode(NamedTuple):
    """A finished episode: its undiscounted return and its length in environment steps."""

    episode_return: float
    length: int


class Trajectory(NamedTuple):
    """Descriptor of a committed trajectory; the data lie in ``slot``."""

    ticket: int
    slot: int
    length: int
    """Rows written, 1..T."""
    env_steps: int
    """Valid transitions in it (reset steps do not count)."""
    version: Version
    """That of its oldest step."""


class Batch(NamedTuple):
    """B trajectories to be used at ``for_version``, in ticket order."""

    for_version: Version
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class StoreTrajectory:
    """To a replay shard: copy the trajectory in ``slot``."""

    ticket: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class DrawPart:
    """To a replay shard: draw ``items`` items into columns ``first`` and on of the draw in
    ``slot``, none older than ``oldest``.
    """

    draw: int
    slot: int
    first: int
    items: int
    oldest: int
    """Number of the oldest version that may be drawn; what is older is removed."""


@dataclass(frozen=True, slots=True)
class Prioritise:
    """To a replay shard: the items in those columns have the priorities that lie beside them."""

    draw: int
    slot: int
    first: int
    items: int


@dataclass(frozen=True, slots=True)
class DropItems:
    """To a replay shard: let everything go, if there is a ``reason``; say what is left in
    any case.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class SaveItems:
    """To a replay shard: write everything into the file at ``path``."""

    path: str


ShardRequest = StoreTrajectory | DrawPart | Prioritise | DropItems | SaveItems


class Holdings(NamedTuple):
    """What a replay shard holds. ``mass``: sum of its items' sampling weights, p^alpha or 1
    each.
    """

    items: int = 0
    mass: float = 0.0
    steps: int = 0
    inserted_steps: int = 0
    removed_items: int = 0
    nbytes: int = 0


class Settlement(NamedTuple):
    """What became of one update: the version it made, from which tickets, under which bound,
    published or not.
    """

    version: Version
    tickets: tuple[int, ...]
    bound: int | None
    published: bool
    skipped: bool = False
    """The optimiser step was skipped (not finite); the version moved on, its weights are those
    before it.
    """


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Returns and lengths of the whole episodes that exactly ``version`` played."""

    version: Version
    returns: tuple[float, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateFile:
    """A written state: the hash and size of its file."""

    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """A learner's state on disk, at one version. ``samples``: transitions trained on so far."""

    version: Version
    samples: int
    file: StateFile


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Where one named tensor lies in the flat weight buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightsTable:
    """Names, shapes, dtypes and offsets of all published tensors (parameters, then normaliser
    state).
    """

    entries: tuple[TableEntry, ...]
    nbytes: int


def shard_file(index: int) -> str:
    """Name of the file that replay shard ``index`` is kept in, in a checkpoint."""
    return f"replay-{index}.safetensors"


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a cache line."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
