"""Settings of algorithms that learn from replay, and their checks against an environment.

Replay draws items, which are windows of an episode. `OffPolicySettings.window` gives their length
and distance. This module does not import PyTorch.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from tianflow.config.on_policy import AlgorithmSettings
from tianflow.config.schedules import ScheduledRate
from tianflow.config.section import Fraction
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import Problem

if TYPE_CHECKING:
    from tianflow.config.model import Config

NETWORKS = ("mlp", "nature_cnn", "impala_resnet")
"""Networks whose torsos these algorithms can use."""
SCALE_ERROR = 0.01
"""Largest error of an end of a range that is scaled to -1..1."""
ABSENT = "absent_setting"
"""Kind of the error of a setting that only the base class has. Such a field is not written."""
Updates = Annotated[int, Field(ge=0)]


def interpolate(start: float, end: float, updates: int, span: int) -> float:
    """Linear interpolation from ``start`` at update 0 to ``end`` at update ``span`` and later.

    A span of 0 gives ``end`` at once.
    """
    return end if updates >= span else start + (end - start) * updates / span


class OffPolicySettings(AlgorithmSettings):
    """Settings of every algorithm that learns from replay.

    The losses have no ``entropy_cost`` and no ``value_cost``: these settings of the base class are
    refused, except for the defaults that older versions wrote, and they are not written.
    """

    live: ClassVar[tuple[str, ...]] = ("learning_rate",)
    recurrent: ClassVar[bool] = False
    """True if the learner trains on sequences, with a recurrent state (``network.lstm``)."""
    priority_exponents: ClassVar[tuple[float, float]] = (0.6, 0.4)
    """Defaults of ``replay.alpha`` and ``replay.beta`` (PER, arXiv 1511.05952; Ape-X, arXiv
    1803.00933).
    """
    anneals_beta: ClassVar[bool] = True
    """True if the default of ``replay.beta`` grows to 1 over the limit of the run, as in PER."""

    entropy_cost: Annotated[SkipJsonSchema[float], Field(exclude=True)] = 0.0
    value_cost: Annotated[SkipJsonSchema[float], Field(exclude=True)] = 0.5
    max_grad_norm: PositiveFloat = 40.0
    """Largest norm of the gradient of each network."""
    batch_size: PositiveInt = 256
    """Number of items in one update."""
    n_step: PositiveInt = 1
    """Number of rewards summed before the value of a later observation (n)."""

    @property
    def window(self) -> tuple[int, int]:
        """(length, period) of items, in steps: length of a window, and distance of the next."""
        return self.n_step, 1

    @property
    def recorded(self) -> tuple[str, ...]:
        """Arrays [T, N] float32 that `Policy.record` adds to a trajectory."""
        return ()

    @model_validator(mode="after")
    def _no_schedule_by_samples(self) -> OffPolicySettings:
        if self.learning_rate_schedule == "linear":
            raise ValueError(
                "learning_rate_schedule = 'linear' decreases with the number of trained samples, "
                "and replay trains on each step many times: the rate would be 0 long before the "
                "end of the run; set it to 'constant', or learning_rate to a table with schedule = "
                "'linear'"
            )
        return self

    @field_validator("entropy_cost", "value_cost")
    @classmethod
    def _no_cost_without_meaning(cls, value: float, info: ValidationInfo) -> float:
        assert info.field_name is not None
        if value != cls.model_fields[info.field_name].default:
            raise PydanticCustomError(ABSENT, "is not a setting of this algorithm")
        return value


class QSettings(OffPolicySettings):
    """Settings of Q-learning: epsilon-greedy exploration and one target network.

    With ``epsilon_base`` every environment has its own epsilon (Ape-X, arXiv 1803.00933, section
    4.1): ``epsilon_base ** (1 + epsilon_alpha * i / (M - 1))`` for environment i of M = actors *
    num_envs. The schedule is not used then.
    """

    live: ClassVar[tuple[str, ...]] = (
        *OffPolicySettings.live,
        "target_update_updates",
        "epsilon_start",
        "epsilon_end",
        "epsilon_updates",
        "epsilon_base",
        "epsilon_alpha",
    )

    double: bool = True
    """Double Q-learning (arXiv 1509.06461): the online network selects the action, and the target
    network evaluates it.
    """
    duelling: bool = True
    """Separate value and advantage streams (arXiv 1511.06581)."""
    huber_delta: PositiveFloat | None = 1.0
    """Error above which the loss is linear; None: squared loss."""
    target_update_updates: PositiveInt = 500
    """Updates between copies of the online network to the target network."""
    epsilon_start: Fraction = 1.0
    """Share of random actions at update 0."""
    epsilon_end: Fraction = 0.05
    """Share of random actions after ``epsilon_updates`` updates."""
    epsilon_updates: Updates = 10_000
    """Number of updates over which epsilon decreases linearly from start to end."""
    epsilon_base: Fraction | None = None
    """Base of a constant epsilon per environment (Ape-X), instead of the schedule; None: the
    schedule.
    """
    epsilon_alpha: Annotated[float, Field(ge=0.0)] = 7.0
    """Spread of the epsilons per environment."""

    @property
    def recorded(self) -> tuple[str, ...]:
        return "q_taken", "q_max"

    def exploration(self, updates: int) -> dict[str, float]:
        """``epsilon`` and ``alpha`` of epsilon ** (1 + alpha * i / (M - 1)) after ``updates``
        updates.

        With the schedule, alpha is 0.
        """
        if self.epsilon_base is not None:
            return {"epsilon": self.epsilon_base, "alpha": self.epsilon_alpha}
        return {
            "epsilon": interpolate(
                self.epsilon_start, self.epsilon_end, updates, self.epsilon_updates
            ),
            "alpha": 0.0,
        }


class DQNSettings(QSettings):
    """DQN (Nature 518, 2015) with double Q-learning, duelling streams, n-step returns and
    priorities.

    The additions are the most effective parts of Rainbow (arXiv 1710.02298).
    """

    splits_over_ranks: ClassVar[bool] = True
    fixed_shapes: ClassVar[bool] = True
    ends_only: ClassVar[bool] = True
    name: str = "dqn"
    n_step: PositiveInt = 3


class R2D2Settings(QSettings):
    """R2D2 (Kapturowski et al., ICLR 2019): recurrent Q-learning from stored states, with burn-in.

    An item has ``burn_in`` steps that only update the stored state, then ``unroll`` trained steps.
    A window that begins with its episode needs no burn-in, so all of its steps are trained on.
    Every step of an episode is trained on.
    """

    recurrent: ClassVar[bool] = True
    previous_step: ClassVar[bool] = True
    priority_exponents: ClassVar[tuple[float, float]] = (0.9, 0.6)
    anneals_beta: ClassVar[bool] = False

    splits_over_ranks: ClassVar[bool] = True
    name: str = "r2d2"
    learning_rate: ScheduledRate = 1e-4
    discount: Fraction = 0.997
    adam_epsilon: PositiveFloat = 1e-3
    batch_size: PositiveInt = 64
    n_step: PositiveInt = 5
    huber_delta: PositiveFloat | None = None
    burn_in: Annotated[int, Field(ge=0)] = 40
    """Number of steps that only update the stored state."""
    unroll: PositiveInt = 40
    """Number of trained steps in an item."""
    overlap: Annotated[int, Field(ge=0)] = 0
    """Number of trained steps that two adjacent items share; 0: one item per step."""
    value_rescaling: PositiveFloat | None = 1e-3
    """Epsilon of the value rescaling h(x) = sign(x)(sqrt(|x| + 1) - 1) + epsilon x (arXiv
    1805.11593); None: without rescaling.
    """
    priority_eta: Fraction = 0.9
    """Weight of the largest error in the priority of an item; the rest is the mean error."""

    @property
    def window(self) -> tuple[int, int]:
        return self.burn_in + self.unroll, self.unroll - self.overlap

    @model_validator(mode="after")
    def _windows_move_on(self) -> R2D2Settings:
        if self.overlap >= self.unroll:
            raise ValueError(
                f"overlap = {self.overlap} is not below unroll = {self.unroll}: items would never "
                "advance; lower overlap"
            )
        return self


class ContinuousSettings(OffPolicySettings):
    """Settings of SAC and TD3: two critics, and slowly updated target networks."""

    live: ClassVar[tuple[str, ...]] = (*OffPolicySettings.live, "target_smoothing")
    fixed_shapes: ClassVar[bool] = True
    ends_only: ClassVar[bool] = True

    learning_rate: ScheduledRate = 3e-4
    """Learning rate of actor and critics, and of SAC's temperature."""
    adam_epsilon: PositiveFloat = 1e-8
    target_smoothing: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """Share by which each target network moves towards its online network per step."""


class SACSettings(ContinuousSettings):
    """SAC with automatic temperature (arXiv 1812.05905).

    With ``n_step`` above 1 the entropy of intermediate steps is not counted.
    """

    measures_divergence: ClassVar[bool] = True
    splits_over_ranks: ClassVar[bool] = True
    name: str = "sac"
    initial_temperature: PositiveFloat = 1.0
    """Weight of the entropy at update 0."""
    target_entropy: float | Literal["auto"] | None = "auto"
    """Target entropy of actions scaled to -1..1, in nats; auto: minus the number of action
    components; None: constant temperature.
    """


class TD3Settings(ContinuousSettings):
    """TD3 (arXiv 1802.09477). Standard deviations are in units of half the range of an action."""

    live: ClassVar[tuple[str, ...]] = (
        *ContinuousSettings.live,
        "noise_start",
        "noise_end",
        "noise_updates",
    )

    splits_over_ranks: ClassVar[bool] = True
    name: str = "td3"
    policy_delay: PositiveInt = 2
    """Number of critic updates per update of actor and targets."""
    target_noise: Annotated[float, Field(ge=0.0)] = 0.2
    """Standard deviation of the noise on target actions."""
    target_noise_clip: Annotated[float, Field(ge=0.0)] = 0.5
    """Largest noise on target actions."""
    noise_start: Annotated[float, Field(ge=0.0)] = 0.1
    """Standard deviation of exploration noise at update 0."""
    noise_end: Annotated[float, Field(ge=0.0)] = 0.1
    """Standard deviation of exploration noise after ``noise_updates`` updates."""
    noise_updates: Updates = 0
    """Number of updates over which exploration noise changes linearly from start to end."""

    def exploration(self, updates: int) -> dict[str, float]:
        """``noise_std`` after ``updates`` updates."""
        return {
            "noise_std": interpolate(self.noise_start, self.noise_end, updates, self.noise_updates)
        }


def check(config: Config, spec: EnvironmentSpec) -> list[Problem]:
    """Problems of a replay algorithm with this environment and network; empty for other
    algorithms.

    The class of the settings decides, because a plug-in may derive from a shipped algorithm. A
    plug-in that derives from `OffPolicySettings` alone brings its own policy and networks.
    """
    settings = config.algorithm
    if not isinstance(settings, OffPolicySettings):
        return []
    found: list[Problem] = []
    if isinstance(settings, QSettings):
        found += _check_values(settings.name, spec)
    if isinstance(settings, ContinuousSettings):
        found += _check_bounds(settings.name, spec)
    if isinstance(settings, QSettings | ContinuousSettings):
        found += _check_network(config, settings)
    return [*found, *_check_normalisation(config)]


def _check_values(name: str, spec: EnvironmentSpec) -> list[Problem]:
    """Q-learning needs a single discrete choice."""
    kind = spec.action.kind
    if kind == "discrete":
        return []
    why = (
        "infinitely many"
        if kind == "box"
        else f"{math.prod(spec.action.categories)} combinations of"
    )
    message = (
        f"learns one value per action, and {spec.id} has {why} actions ({kind} "
        f"{list(spec.action.shape)})"
    )
    return [
        Problem(
            "algorithm.name",
            name,
            message,
            "sac or td3" if kind == "box" else "ppo, impala or a2c, or a single Discrete action",
        )
    ]


def _scales(low: float, high: float) -> bool:
    """True if a range can be scaled to -1..1 in float32, as `networks.q_values.ActionRange` does:
    no sum overflows, and the ends stay apart.
    """
    first, last = _float32(low), _float32(high)
    total, width = _float32(last + first), _float32(last - first)
    centre, half = _float32(total / 2.0), _float32(width / 2.0)
    if not (math.isfinite(centre) and 0.0 < half < math.inf):
        return False
    scaled = ((end - centre) / half for end in (first, last))
    return all(
        abs(found - end) < SCALE_ERROR for found, end in zip(scaled, (-1.0, 1.0), strict=True)
    )


def _float32(number: float) -> float:
    return ctypes.c_float(number).value


def _check_bounds(name: str, spec: EnvironmentSpec) -> list[Problem]:
    """Squashed actions need a bounded range."""
    action = spec.action
    if action.kind != "box":
        message = f"needs continuous actions, and the actions of {spec.id} are {action.kind}"
        return [
            Problem(
                "algorithm.name",
                name,
                message,
                "dqn or r2d2" if action.kind == "discrete" else "ppo, impala or a2c",
            )
        ]
    ranges = tuple(zip(action.low, action.high, strict=True))
    if not all(math.isfinite(low) and math.isfinite(high) and low < high for low, high in ranges):
        found = f"an action of {spec.id} has no bounds, or an empty range"
    elif (narrow := next((each for each in ranges if not _scales(*each)), None)) is not None:
        found = f"float32 cannot represent the range {narrow[0]:g} to {narrow[1]:g} of {spec.id}"
    else:
        return []
    message = f"squashes actions into their range, and {found}"
    return [
        Problem(
            "algorithm.name", name, message, "ppo, impala or a2c, or a wrapper that bounds actions"
        )
    ]


def _check_network(config: Config, settings: OffPolicySettings) -> list[Problem]:
    network, name = config.network, settings.name
    problems = []
    if network.name not in NETWORKS:
        message = (
            f"{name} builds value networks on a built-in torso, and cannot use a network of policy "
            "and value"
        )
        problems.append(Problem("network.name", network.name, message, ", ".join(NETWORKS)))
    if settings.recurrent and not network.lstm:
        problems.append(
            Problem(
                "network.lstm",
                0,
                f"{name} needs a recurrent state",
                "at least 1, or dqn",
            )
        )
    if not settings.recurrent and network.lstm:
        problems.append(
            Problem(
                "network.lstm",
                network.lstm,
                f"{name} has no recurrent state",
                "0, or r2d2",
            )
        )
    if network.share_torso:
        message = f"the networks of {name} have different losses and cannot share a torso"
        problems.append(Problem("network.share_torso", True, message, "false"))
    if "log_std" in network.kwargs:
        message = f"{name} has no separate standard deviation"
        problems.append(
            Problem("network.kwargs.log_std", network.kwargs["log_std"], message, "without log_std")
        )
    return problems


def _check_normalisation(config: Config) -> list[Problem]:
    if not config.env.normalisation.returns:
        return []
    message = "replayed rewards have an older scale, so one value would be learned in several units"
    accepted = "false" + (
        "; value_rescaling limits large returns"
        if isinstance(config.algorithm, R2D2Settings)
        else ""
    )
    return [Problem("env.normalisation.returns", True, message, accepted)]
