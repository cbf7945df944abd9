"""A vector environment of which every autoreset mode looks alike: rows in, rows out, and exact
episodes.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.core.payloads import Autoreset, EnvironmentSpec, Episode
from tianflow.envs.spec import (
    ActionCodec,
    Array,
    Arrays,
    ObservationCodec,
    UnexpectedShapeError,
    action_spec,
)
from tianflow.errors import EnvironmentFailedError

_MEMORY = 32
"""Steps for which there is memory before the first time that more are taken between two calls of
`VectorEnvironment.settle`.
"""
MODES: dict[str, Autoreset] = {
    "nextstep": "next_step",
    "samestep": "same_step",
    "disabled": "disabled",
}


def failed(doing: str, error: BaseException) -> EnvironmentFailedError:
    """What the environment raised, with its traceback as text that can be sent: it may hold lone
    surrogates, or have no text.
    """
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - whatever the error of a user does when it is asked for its text
        said = "(its text cannot be told)"
    texts = (
        f"the environment failed in {doing}: {type(error).__name__}: {said}",
        "".join(traceback.format_exception(error)),
    )
    return EnvironmentFailedError(
        *(text.encode("utf-8", "backslashreplace").decode("utf-8") for text in texts)
    )


@contextlib.contextmanager
def failures_named(doing: str) -> Iterator[None]:
    """Whatever the user's environment raises, `SystemExit` included, becomes an
    `EnvironmentFailedError`.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise failed(doing, error) from error


def autoreset_of(metadata: dict[str, Any]) -> Autoreset:
    """The autoreset mode in a vector environment's ``metadata``; without one it is NEXT_STEP,
    Gymnasium's default.

    Raises:
        ValueError: if there is one that Gymnasium does not know.
    """
    mode = metadata.get("autoreset_mode", "NextStep")
    key = str(getattr(mode, "value", mode)).lower().replace("_", "").replace("-", "")
    if key not in MODES:
        raise ValueError(
            f"metadata['autoreset_mode'] is {mode!r}; known are NextStep, SameStep and Disabled"
        )
    return MODES[key]


@dataclass(
    slots=True
)  # not frozen: thousands a second are made, and a frozen one costs three times as much
class StepRow:
    """Where what one step leads to is written. N environments; t is the step, u = t + 1 what comes
    after it.
    """

    observation: Arrays
    """{leaf: [N, *leaf]}, of u."""
    start: Array
    """[N] bool, of u; True where that observation is the first of an episode. Perhaps not before it
    is settled: `starts_at_once`.
    """
    mask: Array | None
    """[N, mask_size] bool, of u; None when the environment gives no action masks."""
    final: Arrays
    """{leaf: [N, *leaf]}, of t: what really followed, before any reset. Empty with NEXT_STEP, where
    that is ``observation``.
    """


class VectorEnvironment:
    """Steps a `gymnasium.vector.VectorEnv` and writes what happened into rows, which `settle`
    completes, any number at once.

    NEXT_STEP: the step after the last one of an episode only resets, and is not valid. SAME_STEP
    and DISABLED look alike to the caller: every step is valid, and ``final`` holds the true next
    observation of *every* environment. Every failure of the environment itself is an
    `EnvironmentFailedError`; afterwards the vector is not to be used again.
    """

    def __init__(self, vector: Any, env_id: str, frames_per_step: int = 1) -> None:
        self._vector = vector
        self.observations = ObservationCodec(vector.single_observation_space)
        actions = action_spec(vector.single_action_space)
        self._actions = ActionCodec(actions)
        self.num_envs = int(vector.num_envs)
        self._shapes = ((self.num_envs,),) * 3
        self.spec = EnvironmentSpec(
            env_id,
            self.observations.leaves,
            actions,
            self.num_envs,
            autoreset_of(vector.metadata),
            frames_per_step=frames_per_step,
        )
        """Its ``action_mask`` is settled by the first `reset`, which tells `gives_masks`."""
        self.gives_masks = False
        self._needs_more = True
        """Whether every step has more to write than `step` does; as of `reset`."""
        self._arrive = {
            "next_step": self._arrive_next_step,
            "same_step": self._arrive_same_step,
            "disabled": self._arrive_disabled,
        }[self.spec.autoreset]
        self.starts_at_once = True
        """False: with NEXT_STEP and without masks, rows say which episodes begin in them only once
        they are settled, which is quicker.
        """
        self._over: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        """Whose next step only resets; after a step that did not say so at once, as of the last
        call of `settle`.
        """
        self._rewards = np.zeros((1, self.num_envs), np.float64)
        """Returns so far as of the last `settle`, then ``_unsettled`` rows: rewards of the steps
        since, as the environment gave them.
        """
        self._terminated: NDArray[np.bool_] = np.zeros((0, self.num_envs), np.bool_)
        self._truncated: NDArray[np.bool_] = np.zeros((0, self.num_envs), np.bool_)
        self._unsettled = 0
        self._make_room(_MEMORY)
        self._born = np.zeros(self.num_envs, np.int64)
        """The clock when each environment's episode began, so that its length need not be counted
        at every step.
        """
        self._clock = 0
        self._finished: tuple[list[int], list[Episode]] = [], []

    def reset(self, seed: int, observation: Arrays, mask: Array | None) -> None:
        """Begin anew: environment i is seeded with ``seed + i``. Writes first observations and
        masks.

        Raises:
            EnvironmentFailedError: if an environment raises.
            UnexpectedShapeError: if an observation or mask has not the shape that the spaces say.
        """
        with failures_named("reset"):
            first, info = self._vector.reset(seed=seed)
        self.gives_masks = "action_mask" in info and self.spec.action.kind != "box"
        self._needs_more = self.gives_masks or self.spec.autoreset != "next_step"
        self.observations.encode(first, observation)
        self._over[:], self._rewards[0] = False, 0.0
        self._write_mask(info, mask)
        self._born[:], self._clock = 0, 0
        self._unsettled = 0
        self.take_finished()

    def step(self, stored: Array, row: StepRow) -> None:
        """Take the actions ``stored`` [N, *stored] and write what they lead to into ``row``; the
        rest is kept until `settle` asks for it.

        Raises:
            EnvironmentFailedError: if an environment raises.
            UnexpectedShapeError: if what it returns has another shape than the spaces say.
        """
        actions = self._actions.decode(stored)
        try:
            observation, reward, terminated, truncated, info = self._vector.step(actions)
        except (
            Exception,
            SystemExit,
        ) as error:  # the user's code may raise anything; the actor has a policy for it
            raise failed("step", error) from error
        try:
            shapes = reward.shape, terminated.shape, truncated.shape
        except AttributeError:  # whoever writes a vector may give lists
            shapes = np.shape(reward), np.shape(terminated), np.shape(truncated)
        if shapes != self._shapes:
            found = f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
            raise UnexpectedShapeError(
                f"reward, terminated and truncated have shapes {found} instead of {self._shapes[0]}"
            )
        if self._unsettled == len(self._given):
            self._make_room(self._unsettled)
        rewards, ends, cuts = self._given[self._unsettled]
        self._unsettled += 1
        rewards[...], ends[...], cuts[...] = reward, terminated, truncated
        self.observations.encode(observation, row.observation)
        if self.starts_at_once or self._needs_more:
            self._arrive(info, row, ends, cuts)

    def settle(
        self, *, reward: Array, terminated: Array, truncated: Array, valid: Array, start: Array
    ) -> None:
        """Complete the rows of all steps since the last call, time first: what is the same for many
        rows as for one is done once.

        Args:
            reward: [T, N] float32; becomes what the steps gave, and 0 on reset steps.
            terminated: [T, N] bool; becomes what the steps gave, and False on reset steps.
            truncated: [T, N] bool; becomes what the steps gave, and False on reset steps.
            valid: [T, N] bool; becomes False where the step only reset an environment, and else
                True.
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
        self._tally(over)

    def take_finished(self) -> tuple[list[int], list[Episode]]:
        """Of the episodes that ended in settled rows since the last call: the indices of their
        environments, and they themselves.
        """
        finished, self._finished = self._finished, ([], [])
        return finished

    def close(self) -> None:
        """Let go of the environments. What they raise in doing so helps nobody any more."""
        with contextlib.suppress(Exception):
            self._vector.close()

    def _make_room(self, steps: int) -> None:
        """Memory for the rewards and flags of so many more steps, with views of its rows, so that a
        step makes none.
        """
        more = np.zeros((steps, self.num_envs), np.bool_)
        self._rewards = np.concatenate((self._rewards, more))
        self._terminated, self._truncated = (
            np.concatenate((flags, more)) for flags in (self._terminated, self._truncated)
        )
        self._given = list(zip(self._rewards[1:], self._terminated, self._truncated, strict=True))

    def _arrive_next_step(
        self, info: dict[str, Any], row: StepRow, terminated: Array, truncated: Array
    ) -> None:
        row.start[:] = self._over
        np.greater(
            terminated | truncated, self._over, out=self._over
        )  # what was only reset has not ended again
        self._write_mask(info, row.mask)

    def _write_starts(self, over: Array, start: Array) -> None:
        """What `_arrive_next_step` would have written, for all steps [T, N] of which ``over`` says
        whether they end an episode.
        """
        start[0], start[1:] = self._over, over[:-1]
        if (start & over).any():  # what was only reset has not ended again
            for t in range(1, len(over)):
                np.greater(over[t - 1], start[t - 1], out=start[t])
        np.greater(over[-1], start[-1], out=self._over)

    def _arrive_same_step(
        self, info: dict[str, Any], row: StepRow, terminated: Array, truncated: Array
    ) -> None:
        for name, final in row.final.items():
            final[:] = row.observation[name]
        over = np.logical_or(terminated, truncated, out=row.start)
        if over.any():
            final_observation = info.get("final_obs")
            if final_observation is None:
                raise EnvironmentFailedError(
                    "a vector with SAME_STEP autoreset ended an episode without info['final_obs']"
                )
            self.observations.encode_where(final_observation, over, row.final)
        self._write_mask(info, row.mask)

    def _arrive_disabled(
        self, info: dict[str, Any], row: StepRow, terminated: Array, truncated: Array
    ) -> None:
        for name, final in row.final.items():
            final[:] = row.observation[name]
        over = np.logical_or(terminated, truncated, out=row.start)
        self._over[:] = over
        self._write_mask(info, row.mask)
        if over.any():
            with failures_named("reset"):
                first, first_info = self._vector.reset(options={"reset_mask": over.copy()})
            self.observations.encode_where(first, over, row.observation)
            self._over[:] = False
            self._write_mask(first_info, row.mask, over)

    def _tally(self, over: Array) -> None:
        """Add the rewards of the steps to the returns so far, and note the episodes that are
        ``over`` [T, N].
        """
        count, environments = over.shape
        # Which episode each row of `_rewards` belongs to, and what comes after them: its
        # environment, and how many ended there before.
        episode = np.zeros((count + 2, environments), np.int64)
        episode[0] = np.arange(environments)
        np.multiply(over, environments, out=episode[2:])
        np.add.accumulate(episode, axis=0, out=episode)
        # One after the other, so each sum is that of its episode alone, bit for bit.
        returns = np.bincount(
            episode[:-1].ravel(), self._rewards[: count + 1].ravel(), minlength=episode.size
        )
        last = over.ravel().nonzero()[0]
        ended = episode[1:].ravel().take(last)
        ends, indices = np.divmod(last, environments)
        ends += self._clock + 1
        born = np.zeros(len(returns), np.int64)
        born[:environments], born[ended + environments] = (
            self._born,
            ends + (self.spec.autoreset == "next_step"),
        )
        self._finished[0].extend(indices.tolist())
        self._finished[1].extend(
            map(
                Episode._make,
                zip(returns.take(ended).tolist(), (ends - born.take(ended)).tolist(), strict=True),
            )
        )
        self._rewards[0], self._born = returns.take(episode[-1]), born.take(episode[-1])
        self._clock += count

    def _write_mask(
        self, info: dict[str, Any], mask: Array | None, where: Array | None = None
    ) -> None:
        """Copy the masks in ``info``, of the environments ``where`` [N] (None: all). Where an
        episode is over everything is allowed.

        What is not there must not be what another step left in the same memory: only where an
        episode is over it may be missing.
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
                f"info['action_mask'] of environment {missing[0]} was there at the first reset "
                "and is missing now"
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
    """One environment's mask, an array or a tuple of one array for each choice, as [mask_size]."""
    parts = mask if isinstance(mask, tuple | list) else (mask,)
    return np.concatenate([np.ravel(part) for part in parts])
