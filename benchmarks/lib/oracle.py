"""Algorithms that learn nothing and whose data prove their own staleness: the action *is* the
version of the weights.

`Oracle` uses each trajectory once, `ReplayOracle` draws items from replay. The learner counts its
updates itself. It reads actions and never the labels of the system. It appends one line for
each update to the file ``algorithm.record``. An action also names the learner process that made the
weights, so data of a lost learner cannot pass for data of its successor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import PositiveInt

from tianflow.config.model import AlgorithmSettings, Config
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, WeightsTable
from tianflow.interfaces import ActorStep, LearnerBatch, StepResult

if TYPE_CHECKING:
    # Processes that only read the settings import this module, and PyTorch takes a second.
    import torch

    Tree = Mapping[str, torch.Tensor]
NBYTES = 64
"""Size of the weights: one number, padded to a cache line."""
PER_LEARNER = 2**24
"""An action is ``pid * PER_LEARNER + updates``. It is below 2**52, so a float64 holds it too."""
_NO_VERSION = 2**62


class OracleSettings(AlgorithmSettings):
    """Delays of the fake. Seconds are means of exponential distributions."""

    measures_divergence: ClassVar[bool] = True

    name: str = "benchmarks.lib.oracle:Oracle"
    record: str = ""
    update_s: float = 0.0
    load_s: float = 0.0

    def noise_size(self, action: ActionSpec) -> int:  # noqa: ARG002 - the action does not matter
        return 1


class ReplayOracleSettings(OracleSettings):
    """Settings of the oracle that draws single steps from replay."""

    live: ClassVar[tuple[str, ...]] = ("learning_rate",)

    name: str = "benchmarks.lib.oracle:ReplayOracle"
    batch_size: PositiveInt = 32

    @property
    def window(self) -> tuple[int, int]:
        return 1, 1

    @property
    def recorded(self) -> tuple[str, ...]:
        return ()


class EchoEnv(gymnasium.Env[NDArray[Any], Any]):
    """Takes any action and ends an episode after ``length`` steps. Each step sleeps ``seconds`` on
    average.

    Environments whose seed lies in ``slow_seeds`` sleep ``factor`` times as long. So do episodes,
    with probability ``slow_share``.
    """

    def __init__(
        self,
        *,
        length: int = 7,
        seconds: float = 0.0,
        jitter: bool = True,
        slow_seeds: tuple[int, ...] = (),
        slow_share: float = 0.0,
        factor: float = 1.0,
    ) -> None:
        self.observation_space = spaces.Box(-1.0, 1e6, (1,), np.float32)
        self.action_space = spaces.Discrete(2**52)
        self._length, self._seconds, self._jitter = length, seconds, jitter
        self._slow_seeds, self._slow_share, self._factor = frozenset(slow_seeds), slow_share, factor
        self._is_slow, self._pace, self._t = False, seconds, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin an episode and draw its pace."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self._is_slow = seed in self._slow_seeds
        slow = self._is_slow or self.np_random.random() < self._slow_share
        self._pace = self._seconds * (self._factor if slow else 1.0)
        self._t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:  # noqa: ARG002 - any action is right
        """Sleep, and count the step."""
        if self._pace:
            time.sleep(self._pace * (self.np_random.exponential() if self._jitter else 1.0))
        self._t += 1
        return np.full(1, self._t, np.float32), 1.0, False, self._t >= self._length, {}


class OraclePolicy:
    """Acts by its weights. Loading them takes ``load_s``."""

    table = WeightsTable((), NBYTES)

    def __init__(self, config: Config, action: ActionSpec) -> None:
        assert isinstance(config.algorithm, OracleSettings)
        self._action, self._load_s = action, config.algorithm.load_s
        self._recorded = config.algorithm.recorded
        self._version = 0

    def load(self, flat: NDArray[np.uint8]) -> None:
        """Take the version from the weights."""
        time.sleep(self._load_s)
        self._version = int(flat[:8].view(np.int64)[0])

    def initial_state(self, num_envs: int) -> Tree:  # noqa: ARG002 - the policy has no memory
        """No state."""
        return {}

    def noise(self, steps: int, num_envs: int, generator: np.random.Generator) -> torch.Tensor:  # noqa: ARG002 - nothing is drawn
        """Noise that the policy does not read."""
        import torch

        return torch.zeros(steps, num_envs, 1)

    def act(
        self,
        observation: Tree,
        state: Tree,
        noise: torch.Tensor | None,  # noqa: ARG002 - the action depends on the weights alone
        mask: torch.Tensor | None = None,  # noqa: ARG002 - likewise
    ) -> ActorStep:
        """The version, as the action of every environment."""
        import torch

        num_envs = len(next(iter(observation.values())))
        shape = (num_envs, *self._action.stored_shape)
        action = torch.full(shape, self._version, dtype=torch.int64)
        return ActorStep(action, torch.zeros(num_envs, 1), state)

    def record(self, parameters: torch.Tensor, action: torch.Tensor) -> Tree:  # noqa: ARG002 - one action has all the probability
        """Zeros, under the names that the settings ask for."""
        import torch

        return {name: torch.zeros(parameters.shape[:-1]) for name in self._recorded}

    def place(self, index: int, count: int) -> None:
        """Every actor explores alike."""


class OracleLearner:
    """Counts its updates and writes down the staleness of its data."""

    def __init__(self, settings: OracleSettings) -> None:
        self._settings = settings
        self._number, self._me = 0, os.getpid()
        self._random = np.random.default_rng()
        self._record = os.open(settings.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def flat(self) -> NDArray[np.uint8]:
        """The version, as weights."""
        words = np.zeros(NBYTES // 8, np.int64)
        words[0] = self._me * PER_LEARNER + self._number
        return words.view(np.uint8)

    def step(
        self, batch: LearnerBatch, should_stop: Callable[[], bool] = lambda: False
    ) -> StepResult:
        """Write down the staleness of ``batch``, and sleep."""
        found = [
            self._number - oldest if pid == self._me else f"of {pid}"
            for pid, oldest in self._oldest(batch)
        ]
        os.write(
            self._record,
            f"{self._me} {self._number} {time.monotonic()} {','.join(map(str, found))}\n".encode(),
        )
        self.compute(should_stop)
        self._number += 1
        return StepResult(int(batch.arrays["valid"].sum()), True, {"number": float(self._number)})

    def retain_policy(self) -> None:
        """No policy is retained, because divergences are random."""

    def divergence(self, batch: LearnerBatch, states: int) -> float:  # noqa: ARG002 - random
        """A random number of nats, 0 to 1."""
        return float(self._random.random())

    def compute(self, should_stop: Callable[[], bool]) -> None:  # noqa: ARG002 - a subclass may wait long
        """Take the time of an update."""
        if self._settings.update_s:
            time.sleep(self._random.exponential(self._settings.update_s))

    def _oldest(self, batch: LearnerBatch) -> list[tuple[int, int]]:
        """(pid, updates) of the oldest action of each trajectory. Rows without an action hold
        zeros.
        """
        trajectories = batch.arrays["version"].shape[1]
        action, valid = (
            batch.arrays[name].reshape(len(batch.arrays[name]), trajectories, -1)
            for name in ("action", "valid")
        )
        _require(not (valid & (action == 0)).any(), "a valid row has no action")
        labels = batch.arrays["version"].unsqueeze(2).expand_as(action)
        _check_labels(labels, action)
        oldest = action.masked_fill(action == 0, _NO_VERSION).amin((0, 2))
        return [divmod(value, PER_LEARNER) for value in oldest.tolist()]

    def set_live(self, learning_rate: float, entropy_cost: float) -> None:
        """No setting has an effect."""

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """The number of updates."""
        return {"number": np.array([self._number])}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue after so many updates."""
        self._number = int(state["number"][0])


class ReplayOracleLearner(OracleLearner):
    """The same for items of one step."""

    def _oldest(self, batch: LearnerBatch) -> list[tuple[int, int]]:
        action, labels = batch.arrays["action"][0], batch.arrays["version"]
        _require(bool((batch.arrays["valid"][0] & (action != 0)).all()), "an item has no action")
        _check_labels(labels, action)
        return [divmod(value, PER_LEARNER) for value in action.tolist()]

    def set_settings(self, settings: AlgorithmSettings, updates: int) -> None:
        """No setting has an effect."""


def _check_labels(labels: torch.Tensor, action: torch.Tensor) -> None:
    acted = action != 0
    _require(
        labels[acted].equal(action[acted] % PER_LEARNER),
        "a label is not the version of the weights that acted",
    )


def _require(holds: bool, otherwise: str) -> None:
    """An error of a component ends the run, so no break of these rules can pass unseen."""
    if not holds:
        raise AssertionError(otherwise)


class Oracle:
    """The algorithm that uses each trajectory once."""

    settings = OracleSettings

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> OraclePolicy:
        """Make the actor's half."""
        return OraclePolicy(config, spec.action)

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> OracleLearner:  # noqa: ARG004 - it computes nothing
        """Make the learner's half."""
        assert isinstance(config.algorithm, OracleSettings)
        return OracleLearner(config.algorithm)


class ReplayOracle(Oracle):
    """The algorithm that draws from replay."""

    settings = ReplayOracleSettings

    @staticmethod
    def make_learner(
        config: Config,
        spec: EnvironmentSpec,  # noqa: ARG004 - it computes nothing
        device: torch.device,  # noqa: ARG004 - likewise
    ) -> OracleLearner:
        """Make the learner's half."""
        assert isinstance(config.algorithm, ReplayOracleSettings)
        return ReplayOracleLearner(config.algorithm)


@dataclass(frozen=True, slots=True)
class Use:
    """One update as its learner saw it: process, number of earlier updates, time, and the staleness
    of each trajectory or item.
    """

    pid: int
    number: int
    at: float
    ages: tuple[int, ...]


def uses(record: Path) -> list[Use]:
    """Read all updates of a record.

    Raises:
        ValueError: a learner was given data of another learner.
    """
    return [parse(line) for line in record.read_text(encoding="utf-8").splitlines()]


def parse(line: str) -> Use:
    """Read one line of a record. Raises as `uses` does."""
    pid, number, at, ages = line.split(maxsplit=3)
    return Use(int(pid), int(number), float(at), tuple(int(age) for age in ages.split(",")))
