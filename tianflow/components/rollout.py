"""grant + weights -> Rollout -> one trajectory in a slot.

A rollout is the computing half of an actor: plain calls on the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tianflow.components.acting import action_selector, zeroed
from tianflow.components.requesting import RequestSelector
from tianflow.components.rows import accumulate, clear_rows, split_rows
from tianflow.components.turns import Turns, Wait, without_waiting
from tianflow.config.networks import PREVIOUS_REWARD
from tianflow.core.payloads import Episode, Version
from tianflow.envs.episode_metrics import Metrics
from tianflow.envs.make import environment_seed, make
from tianflow.envs.progress import EnvironmentProgress
from tianflow.envs.spec import UnexpectedShapeError, in_categories
from tianflow.envs.vector import VectorEnvironment
from tianflow.errors import EnvironmentFailedError, PoisonedTrajectoryError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.config.model import Config
    from tianflow.core.payloads import EnvironmentSpec, Grant
    from tianflow.interfaces import Policy, SlotView, Tree

    Arrays = Mapping[str, NDArray[Any]]


LOOK_AGAIN_S = 0.1
"""Longest time between two looks of a waiting trajectory."""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Contents of a slot: rows (0 if stopped), valid transitions, version of the oldest row,
    episodes, and the metrics of those that have any.
    """

    length: int
    env_steps: int
    version: Version
    episodes: tuple[Episode, ...]
    metrics: tuple[Metrics, ...] = ()


@dataclass(slots=True)
class _Carry:
    """State between trajectories: the next observation, and everything that belongs to it."""

    observation: dict[str, NDArray[Any]]
    mask: NDArray[np.bool_] | None
    start: NDArray[np.bool_]
    state: Tree
    discounted: NDArray[np.float64]


class _Progress:
    """State of the trajectory in progress."""

    __slots__ = ("begun", "environment", "length", "load_weights", "oldest", "version")

    def __init__(
        self,
        environment: VectorEnvironment,
        load_weights: Callable[[], Version],
        begun: Callable[[Version], None],
    ) -> None:
        self.environment, self.load_weights, self.begun = environment, load_weights, begun
        self.version = self.oldest = load_weights()
        self.length = 0

    def refresh(self) -> None:
        """Load newer weights between two steps."""
        self.version = self.load_weights()
        self.oldest = min(self.oldest, self.version)

    def acted(self, version: Version) -> None:
        """An inference server has chosen the next action with ``version``."""
        if self.length == 0:
            self.oldest = version
            self.begun(version)
        self.oldest, self.version = min(self.oldest, version), version


def ignore_begin(version: Version) -> None:
    """Default callback: does nothing."""


class Rollout:
    """Steps one vector environment with one policy, and fills slots in place.

    Episodes and recurrent states continue from one trajectory to the next. After an
    `EnvironmentFailedError` or a `PoisonedTrajectoryError` the contents of the slot are invalid.
    `rebuild` or the next `run` then creates the environments with new seeds. The same seeds and
    weights give the same trajectories, bit for bit.

    Args:
        config: settings of the run; live settings are not read.
        spec: result of `tianflow.envs.probe`.
        policy: selects the actions.
        load_weights: loads the newest weights into ``policy`` and returns their version. It is
            called before the first step of a trajectory, and before every step if
            ``actors.refresh`` is "step".
        component: name in messages.
        actor_index: index of the actor in the run; it determines the seeds.
        incarnation: incarnation of the actor; each has its own seeds.
        make_environment: creates the environments; by default from ``env``.
        actors: returns the current number of actors in the run.
        attributes: returns ``env.set`` in force; None: of ``config``.
        progress: follows the environments, for a watcher on another thread.
        requests: requests the actions from inference servers; None: ``policy`` selects them here.
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
        attributes: Callable[[], Mapping[str, Any]] | None = None,
        progress: EnvironmentProgress | None = None,
        requests: RequestSelector | None = None,
    ) -> None:
        self._actors = actors
        self._progress = following = progress or EnvironmentProgress()
        self._config, self._spec, self._policy, self._component = config, spec, policy, component
        self._requests = requests
        self._selector = (
            action_selector(policy, config.actors.rollout_steps, spec.num_envs)
            if requests is None
            else None
        )
        self._load_weights = load_weights
        self._actor, self._incarnation, self._epoch, self._failures = actor_index, incarnation, 0, 0
        self._builds, self._trajectories = 0, 0
        self._make = make_environment or (
            lambda: make(
                config.env,
                spec.num_envs,
                progress=following,
                previous_step=config.previous_step,
                attributes=attributes,
            )
        )
        self._stopped = False
        self._environment: VectorEnvironment | None = None
        self._carry = self._first_carry()
        self._noise = np.random.default_rng(0)

    def prepare(self) -> VectorEnvironment:
        """Create and reset the environments if they do not exist.

        Raises:
            EnvironmentFailedError: the constructor or the first reset failed; the next attempt uses
                other seeds.
            PoisonedTrajectoryError: the first observation has a wrong shape.
        """
        if self._environment is None:
            try:
                self._environment = self._begin()
            except (EnvironmentFailedError, PoisonedTrajectoryError):
                self._failures += 1
                raise
        return self._environment

    def rebuild(self) -> None:
        """Create the environments again after a failure, with new seeds.

        Raises:
            EnvironmentFailedError: as `prepare`.
            PoisonedTrajectoryError: as `prepare`.
        """
        self.close()
        self.prepare()

    def reseed(self, epoch: int) -> None:
        """Restart environments, recurrent state and noise like a new process with this ``epoch``.

        The environments are created again, because state that survives a reset would differ in a
        resumed run.

        Raises:
            EnvironmentFailedError: as `prepare`.
            PoisonedTrajectoryError: as `prepare`.
        """
        self._epoch, self._incarnation, self._failures = epoch, 0, 0
        self.rebuild()

    def close(self) -> None:
        """Close the environments."""
        if self._environment is not None:
            with self._progress.during("close"):
                self._environment.close()
            self._environment = None

    def stop(self) -> None:
        """Stop this and all later trajectories before the next step. Thread-safe."""
        self._stopped = True

    def run(
        self,
        slot: SlotView,
        grant: Grant,
        min_fragment_steps: int,
        begun: Callable[[Version], None] = ignore_begin,
    ) -> RolloutResult:
        """`turns` at once, where the policy selects the actions here."""
        return without_waiting(self.turns(slot, grant, min_fragment_steps, begun))

    def turns(
        self,
        slot: SlotView,
        grant: Grant,
        min_fragment_steps: int,
        begun: Callable[[Version], None] = ignore_begin,
    ) -> Turns[RolloutResult]:
        """Fill ``slot`` with up to ``actors.rollout_steps`` steps. It waits for inference servers
        only.

        Args:
            slot: the granted memory.
            grant: the grant; a new ``seed_epoch`` restarts everything (`reseed`).
            min_fragment_steps: number of steps from which a cut is honoured.
            begun: called before the first step with the version that chose its action, on this
                thread.

        Raises:
            EnvironmentFailedError: an environment raised.
            PoisonedTrajectoryError: a value is not finite, or has a wrong shape.
        """
        if grant.seed_epoch != self._epoch:
            self.reseed(grant.seed_epoch)
        environment, arrays = self.prepare(), slot.arrays
        try:
            # A number beyond float32 becomes infinite in the slot, and is refused below with its
            # name. The environment has a NumPy error state of its own, and may use autograd.
            with (
                self._progress.during("step"),
                np.errstate(over="ignore", invalid="ignore"),
            ):
                self._write_carry(arrays)
                progress = _Progress(environment, self._load_weights, begun)
                if self._requests is None:
                    begun(progress.version)
                yield from self._step_through(progress, slot, min_fragment_steps)
                if self._stopped:
                    return RolloutResult(0, 0, progress.oldest, ())
                self._finish(progress, arrays)
        except (EnvironmentFailedError, PoisonedTrajectoryError):
            self._failures += 1
            self.close()
            raise
        metrics = tuple(environment.take_metrics())
        _, episodes = environment.take_finished()
        valid = int(np.count_nonzero(arrays["valid"]))
        return RolloutResult(progress.length, valid, progress.oldest, tuple(episodes), metrics)

    def _step_through(
        self, state: _Progress, slot: SlotView, min_fragment_steps: int
    ) -> Turns[None]:
        """Step until the slot is full, a cut is due, or the rollout is stopped."""
        rows = split_rows(slot.arrays, replayed=self._config.algorithm.window is not None)
        self._policy.place(self._actor, self._actors())
        requests, selector = self._requests, self._requests or self._selector
        assert selector is not None
        selector.begin(
            slot,
            self._policy.noise(len(rows), self._spec.num_envs, self._noise),
            self._carry.state,
        )
        # Recurrent state is set to zero where an episode begins.
        state.environment.starts_at_once = bool(self._carry.state)
        each_step = self._requests is None and self._config.actors.refresh == "step"
        choose = None if self._selector is None else self._selector.choose
        step, progress, versions = state.environment.step, slot.progress, slot.arrays["version"]
        versions[:] = state.version.number
        progress(0)
        for t, row in enumerate(rows):
            if self._stopped or (t >= min_fragment_steps and slot.cut_requested()):
                break
            if each_step and t:
                state.refresh()
                versions[t:] = state.version.number
            if requests is not None:
                requests.ask(row, t)
                yield from self._wait(requests, slot, t >= min_fragment_steps)
                if not requests.answered():  # a cut, or the end
                    break
                state.acted(requests.take(row, t))
                versions[t] = state.version.number
            try:
                if choose is not None:
                    choose(row, t)
                step(row.action, row.outcome)
            except UnexpectedShapeError as error:
                raise self._poisoned(str(error), -1, t + 1) from error
            state.length = t + 1
            progress(state.length)

    def _wait(self, requests: RequestSelector, slot: SlotView, may_end: bool) -> Turns[None]:
        """Wait for the answer, the end, or, if the trajectory ``may_end``, a cut."""

        def over() -> bool:
            return self._stopped or requests.answered() or (may_end and slot.cut_requested())

        if over():
            return
        self._progress.waits(True)
        while not over():
            # A cut rings no doorbell, and neither does a server that dies after its answer.
            yield Wait(over, time.monotonic() + LOOK_AGAIN_S)
        self._progress.waits(False)

    def _finish(self, progress: _Progress, arrays: Arrays) -> None:
        """Add the fields that the policy records, check that all values are finite, and store the
        state.
        """
        length, carry = progress.length, self._carry
        given = {
            name: arrays[name][:length] for name in ("reward", "terminated", "truncated", "valid")
        }
        progress.environment.settle(**given, start=arrays["start"][1 : length + 1])
        selector = self._requests or self._selector
        assert selector is not None
        for name, recorded in selector.record(arrays["action"][:length]).items():
            arrays[name][:length] = recorded
        if length < len(arrays["reward"]):
            clear_rows(arrays, length)
        self._refuse_poison(arrays, length)
        self._refuse_unknown_categories(arrays, length)
        if "return_so_far" in arrays:
            accumulate(arrays, length, carry.discounted, self._config.algorithm.discount)
        for name, observation in carry.observation.items():
            observation[:] = arrays[f"obs/{name}"][length]
        carry.start[:] = arrays["start"][length]
        if carry.mask is not None:
            carry.mask[:] = arrays["action_mask"][length]
        carry.state = selector.state
        if "stream" in arrays:
            arrays["stream"][:] = self._actor, self._incarnation, self._builds, self._trajectories
        self._trajectories += 1

    def _write_carry(self, arrays: Arrays) -> None:
        """Write row 0 from the end of the last trajectory.

        Recurrent state is the one before obs[0], zero where an episode begins.
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
            if stored.ndim == state.dim():  # otherwise every row stores its own state
                stored[:] = state.numpy()

    def _begin(self) -> VectorEnvironment:
        """Create and reset the environments, and reset all state between trajectories."""
        run, spec, carry = self._config.run, self._spec, self._first_carry()
        seed_key = {
            "epoch": self._epoch,
            "incarnation": self._incarnation,
            "failures": self._failures,
        }
        with self._progress.during("constructor"):
            environment = self._make()
        try:
            self._check_spaces(environment)
            with self._progress.during("reset"):
                environment.reset(
                    environment_seed(run.seed, self._actor, spec.num_envs, **seed_key),
                    carry.observation,
                    carry.mask,
                )
        except UnexpectedShapeError as error:
            environment.close()
            raise self._poisoned(str(error), -1, 0) from error
        except EnvironmentFailedError:
            environment.close()
            raise
        # The key has one more number than the keys of environments, so the streams differ.
        self._noise = np.random.default_rng(
            np.random.SeedSequence(run.seed, spawn_key=(0, *seed_key.values(), self._actor))
        )
        self._carry = carry
        self._builds, self._trajectories = self._builds + 1, 0
        return environment

    def _check_spaces(self, environment: VectorEnvironment) -> None:
        if (environment.spec.observation, environment.spec.action) != (
            self._spec.observation,
            self._spec.action,
        ):
            raise EnvironmentFailedError(
                f"the spaces of {self._spec.id} have changed since the run was checked"
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
        """Raise for the first value in rows up to ``length`` that is not finite."""
        recorded = self._config.algorithm.recorded
        # Fields that the policy records follow from observations and rewards, so these are first.
        for name in sorted(arrays, key=lambda name: name in recorded):
            array = arrays[name]
            if array.dtype.kind != "f" or name.startswith("state/") or name == "return_so_far":
                continue
            if name.endswith(f"/{PREVIOUS_REWARD}"):  # the reward is checked under its own name
                continue
            is_observation = name.startswith("obs/")
            finite = np.isfinite(array[: length + is_observation])
            if not finite.all():
                step, environment, *_ = np.argwhere(~finite)[0].tolist()
                value = array[step, environment][~finite[step, environment]].ravel()[0]
                # Observation k and row k - 1 of other arrays result from step k; recorded fields of
                # row k precede step k + 1.
                after = step if is_observation or name in recorded else step + 1
                raise self._poisoned(
                    f"{name.rstrip('/')} of environment {environment} is {value}",
                    environment,
                    after,
                )

    def _refuse_unknown_categories(self, arrays: Arrays, length: int) -> None:
        """Raise for the first value in rows up to ``length`` that is outside of its space."""
        for leaf in self._spec.observation:
            if not leaf.categories:
                continue
            array = arrays[f"obs/{leaf.name}"][: length + 1]
            known = in_categories(leaf, array)
            if not known.all():
                step, environment, *_ = np.argwhere(~known)[0].tolist()
                value = array[step, environment][~known[step, environment]].ravel()[0]
                name = f"obs/{leaf.name}".rstrip("/")
                raise self._poisoned(
                    f"{name} of environment {environment} is {value}, counted from 0, outside of "
                    "its observation space",
                    environment,
                    step,
                )

    def _poisoned(self, message: str, environment: int, step: int) -> PoisonedTrajectoryError:
        message = f"{self._component}: {message} after step {step} of its trajectory"
        return PoisonedTrajectoryError(message, environment=environment, step=step)
