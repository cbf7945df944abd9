"""Vector environment with uniform autoreset: rows in, rows out, and exact episodes."""

from __future__ import annotations

import contextlib
import contextvars
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.core.payloads import Autoreset, EnvironmentSpec, Episode
from tianflow.envs import episode_metrics
from tianflow.envs.episode_metrics import Metrics
from tianflow.envs.previous_step import PreviousStep
from tianflow.envs.progress import EnvironmentProgress
from tianflow.envs.spec import (
    ActionCodec,
    Array,
    Arrays,
    ObservationCodec,
    UnexpectedShapeError,
    action_spec,
)
from tianflow.errors import EnvironmentFailedError

_INITIAL_STEPS = 32
"""Steps with preallocated memory between two calls of `VectorEnvironment.settle`."""
_FINAL = frozenset({"final_obs", "final_observation"})
"""Keys by which an info shows that environments were reset in the same step."""
NEEDS_MAIN_THREAD = re.compile(r"\bmain thread\b|no current event loop")
"""Errors of Python's signal, asyncio and tkinter outside of the main thread."""
THREADS = (
    "a run makes, resets and steps environments outside of the main thread; see 'Threads' in "
    "docs/own-environment.md"
)
MODES: dict[str, Autoreset] = {
    "nextstep": "next_step",
    "samestep": "same_step",
    "disabled": "disabled",
}


def failed(doing: str, error: BaseException) -> EnvironmentFailedError:
    """Failure of the environment, with its traceback as text.

    The text is valid UTF-8: exceptions may contain lone surrogates, or fail to produce a message.
    """
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - str() of a user's exception may raise anything
        said = "(the message is not available)"
    advice = f"; {THREADS}" if NEEDS_MAIN_THREAD.search(said) else ""
    texts = (
        f"the environment failed in {doing}: {type(error).__name__}: {said}{advice}",
        "".join(traceback.format_exception(error)),
    )
    return EnvironmentFailedError(
        *(text.encode("utf-8", "backslashreplace").decode("utf-8") for text in texts)
    )


@contextlib.contextmanager
def failures_named(doing: str) -> Iterator[None]:
    """Convert every exception of the user's environment to `EnvironmentFailedError`.

    `SystemExit` is converted, too.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise failed(doing, error) from error


def autoreset_of(metadata: dict[str, Any]) -> Autoreset:
    """The autoreset mode in a vector environment's ``metadata``; NEXT_STEP (Gymnasium's default) if
    absent.

    Raises:
        ValueError: the mode is unknown to Gymnasium.
    """
    mode = metadata.get("autoreset_mode", "NextStep")
    key = str(getattr(mode, "value", mode)).lower().replace("_", "").replace("-", "")
    if key not in MODES:
        raise ValueError(
            f"metadata['autoreset_mode'] is {mode!r}; accepted: NextStep, SameStep and Disabled"
        )
    return MODES[key]


# Not frozen, because thousands per second are created, at three times the cost if frozen.
@dataclass(slots=True)
class StepRow:
    """Destination of the results of one step t, with N environments and u = t + 1."""

    observation: Arrays
    """{leaf: [N, *leaf]}, observation u."""
    start: Array
    """[N] bool, True where observation u is the first of an episode.

    If `starts_at_once` is False, it is valid only after `settle`.
    """
    mask: Array | None
    """[N, mask_size] bool, action mask u; None without masks."""
    final: Arrays
    """{leaf: [N, *leaf]}, the observation after step t, before any reset.

    It is empty with NEXT_STEP, where ``observation`` is that observation.
    """


class VectorEnvironment:
    """Steps a `gymnasium.vector.VectorEnv` and writes the results to rows.

    `settle` completes any number of rows at once. With NEXT_STEP, the step after the last one of an
    episode only resets, and is not valid. With SAME_STEP and DISABLED every step is valid, and
    ``final`` holds the true next observation of *every* environment.

    With ``clips_rewards`` the rewards for learning are clipped to -1..1. Returns of episodes are
    sums of the environment's own rewards, so they are scores of the game.

    With ``previous_step`` the observation has two more leaves, action and reward of the previous
    step (`tianflow.config.networks.previous_leaves`).

    A failure of the environment is an `EnvironmentFailedError`. The vector must not be used
    afterwards.

    Args:
        vector: the environments.
        env_id: their id.
        frames_per_step: frames of one step.
        clips_rewards: see above.
        context: in which the environment's code runs; None: a copy of the current one. NumPy stores
            its error state there, so an environment has one of its own, and `numpy.seterr` in it
            reaches no other code.
        previous_step: see above.

    Raises:
        ValueError: a leaf of the observation has the name of one of these leaves.
    """

    def __init__(
        self,
        vector: Any,
        env_id: str,
        frames_per_step: int = 1,
        *,
        clips_rewards: bool = False,
        context: contextvars.Context | None = None,
        progress: EnvironmentProgress | None = None,
        previous_step: bool = False,
    ) -> None:
        self._vector = vector
        self._run = (contextvars.copy_context() if context is None else context).run
        self._progress = progress or EnvironmentProgress()
        self._progress.follow(vector)
        self.observations = ObservationCodec(vector.single_observation_space)
        actions = action_spec(vector.single_action_space)
        self._actions = ActionCodec(actions)
        self._previous = PreviousStep(actions) if previous_step else None
        if self._previous is not None:
            self._previous.require_new_names(self.observations.leaves)
        self.num_envs = int(vector.num_envs)
        self._shapes = ((self.num_envs,),) * 3
        self.spec = EnvironmentSpec(
            env_id,
            (*self.observations.leaves, *(self._previous.leaves if self._previous else ())),
            actions,
            self.num_envs,
            autoreset_of(vector.metadata),
            frames_per_step=frames_per_step,
            source=self.observations.source,
            clips_rewards=clips_rewards,
        )
        """`has_masks` is known after the first `reset`; the ``action_mask`` of the specification is
        not set.
        """
        self.has_masks = False
        self._needs_more = True
        """True if `step` has more to write than `settle` can complete; set by `reset`."""
        self._write_outcome = {
            "next_step": self._write_next_step,
            "same_step": self._write_same_step,
            "disabled": self._write_disabled,
        }[self.spec.autoreset]
        self._resets_later = self.spec.autoreset == "next_step"
        self.starts_at_once = True
        """False: with NEXT_STEP and without masks, ``start`` is written by `settle`, which is
        faster.
        """
        self._over: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        """Environments whose next step only resets; possibly as of the last `settle`."""
        self._rewards = np.zeros((1, self.num_envs), np.float64)
        """Returns as of the last `settle`, then ``_unsettled`` rows of rewards since then, as
        given.
        """
        self._terminated: NDArray[np.bool_] = np.zeros((0, self.num_envs), np.bool_)
        self._truncated: NDArray[np.bool_] = np.zeros((0, self.num_envs), np.bool_)
        self._unsettled = 0
        self._allocate(_INITIAL_STEPS)
        self._episode_begin = np.zeros(self.num_envs, np.int64)
        """Clock at the beginning of each environment's episode, from which its length follows."""
        self._clock = 0
        self._finished: tuple[list[int], list[Episode]] = [], []
        self._noted: dict[int, dict[int, Metrics]] = {}
        """Metrics of episodes that end, by unsettled row and environment."""
        self._metrics: list[tuple[int, Metrics]] = []

    @property
    def single(self) -> Any:
        """The first environment of a synchronous vector."""
        return self._vector.envs[0]

    def reset(self, seed: int, observation: Arrays, mask: Array | None) -> None:
        """Reset all environments, environment i with ``seed + i``. Writes first observations and
        masks.

        Raises:
            EnvironmentFailedError: an environment raised.
            UnexpectedShapeError: the shape of an observation or mask differs from the space.
        """
        with failures_named("reset"):
            first, info = self._run(self._vector.reset, seed=seed)
        self.has_masks = "action_mask" in info and self.spec.action.kind != "box"
        self._needs_more = (
            self.has_masks
            or self.spec.autoreset != "next_step"
            # The leaves of the previous step are cleared where an episode begins.
            or self._previous is not None
        )
        self.observations.encode(first, observation)
        if self._previous is not None:
            self._previous.clear(observation)
        self._over[:], self._rewards[0] = False, 0.0
        self._write_mask(info, mask)
        self._episode_begin[:], self._clock = 0, 0
        self._unsettled = 0
        self._noted = {}
        self.take_finished()

    def step(self, stored: Array, row: StepRow) -> None:
        """Take the actions ``stored`` [N, *stored] and write their results to ``row``.

        Rewards and flags are stored until `settle`.

        Raises:
            EnvironmentFailedError: an environment raised.
            UnexpectedShapeError: the shape of a result differs from the space.
        """
        actions = self._actions.decode(stored)
        self._progress.calls += 1
        try:
            observation, reward, terminated, truncated, info = self._run(self._vector.step, actions)
        # The user's code may raise anything; the actor decides what follows.
        except (Exception, SystemExit) as error:
            raise failed("step", error) from error
        try:
            shapes = reward.shape, terminated.shape, truncated.shape
        except AttributeError:  # a user's vector may return lists
            shapes = np.shape(reward), np.shape(terminated), np.shape(truncated)
        if shapes != self._shapes:
            found = f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
            raise UnexpectedShapeError(
                f"reward, terminated and truncated have shapes {found} instead of {self._shapes[0]}"
            )
        if self._unsettled == len(self._given):
            self._allocate(self._unsettled)
        rewards, ends, cuts = self._given[self._unsettled]
        self._unsettled += 1
        rewards[...], ends[...], cuts[...] = reward, terminated, truncated
        self.observations.encode(observation, row.observation)
        if self._previous is not None:
            learned = np.clip(rewards, -1.0, 1.0) if self.spec.clips_rewards else rewards
            self._previous.write(stored, learned, row.observation)
        if self.starts_at_once or self._needs_more:
            self._write_outcome(info, row, ends, cuts)
        if info and self._resets_later and not _FINAL.isdisjoint(info):
            raise EnvironmentFailedError(
                "info has a final observation, so the vector resets environments in the step that "
                "ends an episode, but metadata['autoreset_mode'] does not say so; set it to "
                "gymnasium.vector.AutoresetMode.SAME_STEP"
            )
        if self._previous is not None:
            self._previous.clear(row.observation, row.start)
        if info and (episode_metrics.KEY in info or episode_metrics.FINAL in info):
            self._note_metrics(info, np.flatnonzero(ends | cuts).tolist())

    def settle(
        self, *, reward: Array, terminated: Array, truncated: Array, valid: Array, start: Array
    ) -> None:
        """Complete the rows of all steps since the last call, time first.

        Args:
            reward: [T, N] float32; set to the rewards for learning, and to 0 on reset steps.
            terminated: [T, N] bool; set to the flags, and to False on reset steps.
            truncated: [T, N] bool; set to the flags, and to False on reset steps.
            valid: [T, N] bool; set to False on steps that only reset an environment, else True.
            start: [T, N] bool, `StepRow.start` of the same steps.
        """
        count, self._unsettled = len(reward), 0
        rewards = self._rewards[1 : count + 1]
        terminated[...], truncated[...], valid[...] = (
            self._terminated[:count],
            self._truncated[:count],
            True,
        )
        over = terminated | truncated
        if self.spec.autoreset == "next_step":
            if not (self.starts_at_once or self._needs_more):
                self._write_starts(over, start)
            np.logical_not(start, out=valid)
            np.copyto(rewards, 0.0, where=start)
            for ended in (terminated, truncated, over):
                np.logical_and(ended, valid, out=ended)
        reward[...] = rewards
        if self.spec.clips_rewards:
            np.clip(reward, -1.0, 1.0, out=reward)
        self._count_episodes(over)
        if self._noted:
            self._count_metrics(over)

    def take_finished(self) -> tuple[list[int], list[Episode]]:
        """Episodes that ended in settled rows since the last call: environment indices, and
        episodes.
        """
        finished, self._finished = self._finished, ([], [])
        self._metrics.clear()
        return finished

    def take_metrics(self) -> list[Metrics]:
        """Metrics of the episodes that `take_finished` returns next, of those that have any."""
        return [metrics for _, metrics in self.take_metrics_by_environment()]

    def take_metrics_by_environment(self) -> list[tuple[int, Metrics]]:
        """`take_metrics`, each with the number of its environment."""
        metrics, self._metrics = self._metrics, []
        return metrics

    def close(self) -> None:
        """Close the environments. Exceptions are ignored."""
        with contextlib.suppress(Exception):
            self._vector.close()

    def _allocate(self, steps: int) -> None:
        """Allocate rewards and flags of ``steps`` more steps, with views of their rows."""
        more = np.zeros((steps, self.num_envs), np.bool_)
        self._rewards = np.concatenate((self._rewards, more))
        self._terminated, self._truncated = (
            np.concatenate((flags, more)) for flags in (self._terminated, self._truncated)
        )
        self._given = list(zip(self._rewards[1:], self._terminated, self._truncated, strict=True))

    def _write_next_step(
        self, info: dict[str, Any], row: StepRow, terminated: Array, truncated: Array
    ) -> None:
        row.start[:] = self._over
        # A step that only resets does not end an episode again.
        np.greater(terminated | truncated, self._over, out=self._over)
        self._write_mask(info, row.mask)

    def _write_starts(self, over: Array, start: Array) -> None:
        """Write the starts of `_write_next_step` for all steps; ``over`` [T, N]: the step ends an
        episode.
        """
        start[0], start[1:] = self._over, over[:-1]
        if (start & over).any():  # a step that only resets does not end an episode again
            for t in range(1, len(over)):
                np.greater(over[t - 1], start[t - 1], out=start[t])
        np.greater(over[-1], start[-1], out=self._over)

    def _write_same_step(
        self, info: dict[str, Any], row: StepRow, terminated: Array, truncated: Array
    ) -> None:
        for name, final in row.final.items():
            final[:] = row.observation[name]
        over = np.logical_or(terminated, truncated, out=row.start)
        if over.any():
            # the second name is that of Gymnasium before 1.0
            final_observation = info.get("final_obs", info.get("final_observation"))
            if final_observation is None:
                raise EnvironmentFailedError(
                    "a vector with SAME_STEP autoreset ended an episode without info['final_obs']"
                )
            self.observations.encode_where(final_observation, over, row.final)
        self._write_mask(info, row.mask)

    def _write_disabled(
        self, info: dict[str, Any], row: StepRow, terminated: Array, truncated: Array
    ) -> None:
        for name, final in row.final.items():
            final[:] = row.observation[name]
        over = np.logical_or(terminated, truncated, out=row.start)
        self._over[:] = over
        self._write_mask(info, row.mask)
        if over.any():
            with failures_named("reset"):
                first, first_info = self._run(
                    self._vector.reset, options={"reset_mask": over.copy()}
                )
            self.observations.encode_where(first, over, row.observation)
            self._over[:] = False
            self._write_mask(first_info, row.mask, over)

    def _note_metrics(self, info: dict[str, Any], ended: list[int]) -> None:
        """Store the metrics in ``info`` of the environments whose episode has ``ended``."""
        if ended and (metrics := episode_metrics.metrics_in(info, ended)):
            self._noted[self._unsettled - 1] = metrics

    def _count_metrics(self, over: Array) -> None:
        """Record the noted metrics of the episodes that end where ``over`` [T, N]."""
        for t, noted in self._noted.items():
            self._metrics += [found for found in noted.items() if over[t, found[0]]]
        self._noted = {}

    def _count_episodes(self, over: Array) -> None:
        """Add the rewards to the returns, and record the episodes that end where ``over`` [T,
        N].
        """
        count, environments = over.shape
        # Number of the episode of each row of `_rewards`, in the order (episodes ended before,
        # environment).
        episode = np.zeros((count + 2, environments), np.int64)
        episode[0] = np.arange(environments)
        np.multiply(over, environments, out=episode[2:])
        np.add.accumulate(episode, axis=0, out=episode)
        # Sums in sequence, so each return is that of its episode alone, bit for bit.
        returns = np.bincount(
            episode[:-1].ravel(), self._rewards[: count + 1].ravel(), minlength=episode.size
        )
        last = over.ravel().nonzero()[0]
        ended = episode[1:].ravel().take(last)
        ends, indices = np.divmod(last, environments)
        ends += self._clock + 1
        begin = np.zeros(len(returns), np.int64)
        begin[:environments], begin[ended + environments] = (
            self._episode_begin,
            ends + (self.spec.autoreset == "next_step"),
        )
        self._finished[0].extend(indices.tolist())
        self._finished[1].extend(
            map(
                Episode._make,
                zip(returns.take(ended).tolist(), (ends - begin.take(ended)).tolist(), strict=True),
            )
        )
        self._rewards[0], self._episode_begin = returns.take(episode[-1]), begin.take(episode[-1])
        self._clock += count

    def _write_mask(
        self, info: dict[str, Any], mask: Array | None, where: Array | None = None
    ) -> None:
        """Copy the masks in ``info`` of the environments ``where`` [N] (None: all).

        Where an episode is over, all actions are allowed. A mask may be missing only there;
        otherwise the mask of an earlier step would remain in memory.
        """
        if mask is None:
            return
        wanted = np.ones(self.num_envs, np.bool_) if where is None else where
        given: Any = info.get("action_mask")
        present = wanted & (
            False if given is None else np.asarray(info.get("_action_mask", wanted), np.bool_)
        )
        missing = np.flatnonzero(wanted & ~present & ~self._over)
        if len(missing):
            raise UnexpectedShapeError(
                f"info['action_mask'] of environment {missing[0]} is missing, although the first "
                "reset returned masks"
            )
        for index in np.flatnonzero(present).tolist():
            flat = flat_mask(given[index])
            if flat.shape != mask.shape[1:]:
                raise UnexpectedShapeError(
                    f"info['action_mask'] of environment {index} has shape {flat.shape} instead "
                    f"of {mask.shape[1:]}"
                )
            mask[index] = flat
        mask[self._over] = True


def flat_mask(mask: Any) -> Array:
    """One environment's mask, an array or a tuple of arrays per choice, as [mask_size]."""
    parts = mask if isinstance(mask, tuple | list) else (mask,)
    return np.concatenate([np.ravel(part) for part in parts])
