"""grant + weights -> Rollout -> one trajectory in a slot. The actor's compute half: plain calls,
made on the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tianflow.components.acting import acting, zeroed
from tianflow.components.rows import accumulate, blank, take_apart
from tianflow.core.payloads import Episode, Version
from tianflow.envs.make import environment_seed, make
from tianflow.envs.spec import UnexpectedShapeError
from tianflow.envs.vector import VectorEnvironment
from tianflow.errors import EnvironmentFailedError, PoisonedTrajectoryError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.config.model import Config
    from tianflow.core.payloads import EnvironmentSpec, Grant
    from tianflow.interfaces import Policy, SlotView, Tree

    Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What was written into the slot: rows (0 if it was stopped), valid transitions, version of the
    oldest row, ended episodes.
    """

    length: int
    env_steps: int
    version: Version
    episodes: tuple[Episode, ...]


@dataclass(slots=True)
class _Carry:
    """What lives on between trajectories: the observation that the next action is chosen from, and
    all that goes with it.
    """

    observation: dict[str, NDArray[Any]]
    mask: NDArray[np.bool_] | None
    start: NDArray[np.bool_]
    state: Tree
    discounted: NDArray[np.float64]


class _Walk:
    """One trajectory in the making."""

    __slots__ = ("environment", "length", "load_weights", "oldest", "version")

    def __init__(self, environment: VectorEnvironment, load_weights: Callable[[], Version]) -> None:
        self.environment, self.load_weights = environment, load_weights
        self.version = self.oldest = load_weights()
        self.length = 0

    def refresh(self) -> None:
        """Take newer weights between two steps."""
        self.version = self.load_weights()
        self.oldest = min(self.oldest, self.version)


def ignore(version: Version) -> None:
    """Nobody wants to know that the trajectory began."""


class Rollout:
    """Steps one vector of environments with one policy and fills slots, in place.

    An episode goes on from one trajectory to the next, with its recurrent state. After an
    `EnvironmentFailedError` or a `PoisonedTrajectoryError` nothing of the slot may be used, and the
    environments are made anew, with other seeds, by `rebuild` or by the next `run`. The same seeds
    and weights give the same trajectories, bit for bit.

    Args:
        config: settings of the run; its live part is not read.
        spec: what `tianflow.envs.probe` found.
        policy: chooses the actions.
        load_weights: brings the newest weights into ``policy`` and says which version they are.
            Called before the first step of a trajectory, and before every other one if
            ``actors.refresh`` is "step".
        component: name for messages.
        actor_index: which actor of the run it is; its seeds are its own.
        incarnation: which of the actor's lives this is; other seeds in each.
        make_environment: makes the environments, not yet reset; by default what ``env`` says.
        actors: how many actors the run has now.
    """

    def __init__(
        self,
        *,
        config: Config,
        spec: EnvironmentSpec,
        policy: Policy,
        load_weights: Callable[[], Version],
        component: str,
        actor_index: int,
        incarnation: int = 0,
        make_environment: Callable[[], VectorEnvironment] | None = None,
        actors: Callable[[], int] = lambda: 1,
    ) -> None:
        self._actors = actors
        self._config, self._spec, self._policy, self._component = config, spec, policy, component
        self._acting = acting(policy, config.actors.rollout_steps, spec.num_envs)
        self._load_weights = load_weights
        self._actor, self._incarnation, self._epoch, self._failures = actor_index, incarnation, 0, 0
        self._made, self._written = 0, 0
        self._make = make_environment or (lambda: make(config.env, spec.num_envs))
        self._stopped = False
        self._environment: VectorEnvironment | None = None
        self._carry = self._first_carry()
        self._noise = np.random.default_rng(0)

    def prepare(self) -> VectorEnvironment:
        """Make and reset the environments, unless they are there.

        Raises:
            EnvironmentFailedError: if their constructor or first reset raises; the next attempt
                uses other seeds.
            PoisonedTrajectoryError: if the first observation has a wrong shape.
        """
        if self._environment is None:
            try:
                self._environment = self._begin()
            except (EnvironmentFailedError, PoisonedTrajectoryError):
                self._failures += 1
                raise
        return self._environment

    def rebuild(self) -> None:
        """Make the environments anew after a failure, with seeds not used before. Raises as
        `prepare` does.
        """
        self.close()
        self.prepare()

    def reseed(self, epoch: int) -> None:
        """Begin as a fresh process of that run seed, actor and ``epoch`` would: environments,
        recurrent state and noise.

        The environments are made anew, because what one keeps across resets would differ in a
        resumed run. Raises as `prepare` does.
        """
        self._epoch, self._incarnation, self._failures = epoch, 0, 0
        self.rebuild()

    def close(self) -> None:
        """Let go of the environments."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def stop(self) -> None:
        """End the trajectory in the making, and all later ones, before the next step. May be called
        from any thread.
        """
        self._stopped = True

    def run(
        self,
        slot: SlotView,
        grant: Grant,
        min_fragment_steps: int,
        begun: Callable[[Version], None] = ignore,
    ) -> RolloutResult:
        """Fill ``slot`` with up to ``actors.rollout_steps`` steps.

        Args:
            slot: the granted memory.
            grant: another ``seed_epoch`` than the last one begins everything anew (`reseed`).
            min_fragment_steps: a cut is honoured once so many steps are there.
            begun: told the version before the first step is taken, on this thread.

        Raises:
            EnvironmentFailedError: if an environment raises.
            PoisonedTrajectoryError: if something is not finite or has a wrong shape.
        """
        if grant.seed_epoch != self._epoch:
            self.reseed(grant.seed_epoch)
        environment, arrays = self.prepare(), slot.arrays
        try:
            # A number too large for float32 becomes infinite on its way into the slot and is
            # refused below, by name.
            with torch.inference_mode(), np.errstate(over="ignore", invalid="ignore"):
                self._write_carry(arrays)
                walk = _Walk(environment, self._load_weights)
                begun(walk.version)
                self._walk(walk, slot, min_fragment_steps)
                if self._stopped:
                    return RolloutResult(0, 0, walk.oldest, ())
                self._finish(walk, arrays)
        except (EnvironmentFailedError, PoisonedTrajectoryError):
            self._failures += 1
            self.close()
            raise
        _, episodes = environment.take_finished()
        return RolloutResult(
            walk.length, int(np.count_nonzero(arrays["valid"])), walk.oldest, tuple(episodes)
        )

    def _walk(self, walk: _Walk, slot: SlotView, min_fragment_steps: int) -> None:
        """Step until the slot is full, a cut is due, or someone says stop."""
        rows = take_apart(slot.arrays, replayed=self._config.algorithm.window is not None)
        self._policy.place(self._actor, self._actors())
        self._acting.begin(
            self._policy.noise(len(rows), self._spec.num_envs, self._noise), self._carry.state
        )
        walk.environment.starts_at_once = bool(
            self._carry.state
        )  # recurrent state is zeroed where an episode begins
        each_step = self._config.actors.refresh == "step"
        choose, step, progress = self._acting.choose, walk.environment.step, slot.progress
        slot.arrays["version"][:] = walk.version.number
        progress(0)
        for t, row in enumerate(rows):
            if self._stopped or (t >= min_fragment_steps and slot.cut_requested()):
                break
            if each_step and t:
                walk.refresh()
                slot.arrays["version"][t:] = walk.version.number
            try:
                choose(row, t)
                step(row.action, row.outcome)
            except UnexpectedShapeError as error:
                raise self._poisoned(str(error), -1, t + 1) from error
            walk.length = t + 1
            progress(walk.length)

    def _finish(self, walk: _Walk, arrays: Arrays) -> None:
        """What the policy records of all rows at once, the check for what is not finite, and what
        the next trajectory goes on from.
        """
        length, carry = walk.length, self._carry
        given = {
            name: arrays[name][:length] for name in ("reward", "terminated", "truncated", "valid")
        }
        walk.environment.settle(**given, start=arrays["start"][1 : length + 1])
        for name, recorded in self._acting.record(arrays["action"][:length]).items():
            arrays[name][:length] = recorded
        if length < len(arrays["reward"]):
            blank(arrays, length)
        self._refuse_poison(arrays, length)
        if "return_so_far" in arrays:
            accumulate(arrays, length, carry.discounted, self._config.algorithm.discount)
        for name, observation in carry.observation.items():
            observation[:] = arrays[f"obs/{name}"][length]
        carry.start[:] = arrays["start"][length]
        if carry.mask is not None:
            carry.mask[:] = arrays["action_mask"][length]
        carry.state = self._acting.state
        if "stream" in arrays:
            arrays["stream"][:] = self._actor, self._incarnation, self._made, self._written
        self._written += 1

    def _write_carry(self, arrays: Arrays) -> None:
        """Row 0: what the last trajectory ended with. Recurrent state is that before obs[0], zero
        where an episode begins.
        """
        carry = self._carry
        for name, observation in carry.observation.items():
            arrays[f"obs/{name}"][0] = observation
        arrays["start"][0] = carry.start
        if carry.mask is not None:
            arrays["action_mask"][0] = carry.mask
        carry.state = zeroed(carry.state, carry.start)
        for name, state in carry.state.items():
            stored = arrays[f"state/{name}"]
            if stored.ndim == state.dim():  # else every row has its own
                stored[:] = state.numpy()

    def _begin(self) -> VectorEnvironment:
        """Make and reset the environments and begin everything that a trajectory carries on."""
        run, spec, carry = self._config.run, self._spec, self._first_carry()
        era = {"epoch": self._epoch, "incarnation": self._incarnation, "failures": self._failures}
        environment = self._make()
        try:
            self._check_spaces(environment)
            environment.reset(
                environment_seed(run.seed, self._actor, spec.num_envs, **era),
                carry.observation,
                carry.mask,
            )
        except UnexpectedShapeError as error:
            environment.close()
            raise self._poisoned(str(error), -1, 0) from error
        except EnvironmentFailedError:
            environment.close()
            raise
        # One number more than the keys that environments are seeded from, so no stream is used
        # twice.
        self._noise = np.random.default_rng(
            np.random.SeedSequence(run.seed, spawn_key=(0, *era.values(), self._actor))
        )
        self._carry = carry
        self._made, self._written = self._made + 1, 0
        return environment

    def _check_spaces(self, environment: VectorEnvironment) -> None:
        if (environment.spec.observation, environment.spec.action) != (
            self._spec.observation,
            self._spec.action,
        ):
            raise EnvironmentFailedError(
                f"the spaces of {self._spec.id} are not those that it had when the run was checked"
            )

    def _first_carry(self) -> _Carry:
        spec, n = self._spec, self._spec.num_envs
        return _Carry(
            {leaf.name: np.zeros((n, *leaf.shape), leaf.dtype) for leaf in spec.observation},
            np.ones((n, spec.action.mask_size), np.bool_) if spec.action_mask else None,
            np.ones(n, np.bool_),
            self._policy.initial_state(n),
            np.zeros(n, np.float64),
        )

    def _refuse_poison(self, arrays: Arrays, length: int) -> None:
        """Raise for the first thing in rows up to ``length`` that is not finite."""
        for name, array in arrays.items():
            if array.dtype.kind != "f" or name.startswith("state/") or name == "return_so_far":
                continue
            is_observation = name.startswith("obs/")
            finite = np.isfinite(array[: length + is_observation])
            if not finite.all():
                step, environment, *_ = np.argwhere(~finite)[0].tolist()
                value = array[step, environment][~finite[step, environment]].ravel()[0]
                # Observation k and row k - 1 of everything else came out of step k; what is
                # recorded at k was made before step k + 1.
                after = (
                    step if is_observation or name in self._config.algorithm.recorded else step + 1
                )
                raise self._poisoned(
                    f"{name.rstrip('/')} of environment {environment} is {value}",
                    environment,
                    after,
                )

    def _poisoned(self, message: str, environment: int, step: int) -> PoisonedTrajectoryError:
        message = f"{self._component}: {message} after step {step} of its trajectory"
        return PoisonedTrajectoryError(message, environment=environment, step=step)
