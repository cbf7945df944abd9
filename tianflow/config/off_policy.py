"""Settings of the algorithms that learn from replay, and what is wrong with them for an
environment. No PyTorch.

Items. Replay hands out windows of an episode; `OffPolicySettings.window` says how long one is and
how far apart they begin.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tianflow.config.on_policy import AlgorithmSettings, Fraction
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import Problem

if TYPE_CHECKING:
    from tianflow.config.model import Config

NETWORKS = ("mlp", "nature_cnn", "impala_resnet")
"""Networks whose torsos these algorithms build their own networks on."""
Rate = Annotated[float, Field(ge=0.0)]
Updates = Annotated[int, Field(ge=0)]


def between(start: float, end: float, updates: int, span: int) -> float:
    """A straight line from ``start`` at update 0 to ``end`` at update ``span``, and ``end`` from
    there on; span 0 is ``end`` at once.
    """
    return end if updates >= span else start + (end - start) * updates / span


class OffPolicySettings(AlgorithmSettings):
    """What every algorithm that learns from replay has.

    ``entropy_cost`` and ``value_cost`` of the base have no meaning here and are refused when they
    are set.
    """

    live: ClassVar[tuple[str, ...]] = ("learning_rate",)

    max_grad_norm: PositiveFloat = 40.0
    """Of each network by itself."""
    batch_size: PositiveInt = 256
    """Items in one update."""
    n_step: PositiveInt = 1
    """Rewards summed before the value of a later observation is taken."""

    @property
    def window(self) -> tuple[int, int]:
        """(length, period) of items, in steps: how long a window is, and how far apart two of them
        begin.
        """
        return self.n_step, 1

    @property
    def recorded(self) -> tuple[str, ...]:
        """Arrays [T, N] float32 that an actor writes besides the standard ones; `Policy.record`
        makes them.
        """
        return ()

    @model_validator(mode="after")
    def _no_schedule_by_samples(self) -> OffPolicySettings:
        if self.learning_rate_schedule == "linear":
            raise ValueError(
                "learning_rate_schedule = 'linear' falls with the samples learned from, and "
                "replay makes many of each step: "
                "the rate would be 0 long before the end of the run; leave it constant"
            )
        return self

    @model_validator(mode="after")
    def _no_cost_without_meaning(self) -> OffPolicySettings:
        for field in ("entropy_cost", "value_cost"):
            value = getattr(self, field)
            if value != AlgorithmSettings.model_fields[field].default:
                raise ValueError(
                    f"{field} = {value}: the loss of {self.name} has no such term, so nothing "
                    "would follow; leave it out"
                )
        return self


class QSettings(OffPolicySettings):
    """What algorithms that learn the values of discrete actions share: exploration by
    epsilon-greedy, one target network.

    With ``epsilon_base`` every environment has an epsilon of its own (Ape-X, arXiv 1803.00933,
    section 4.1): ``epsilon_base ** (1 + epsilon_alpha * i / (M - 1))`` for environment i of M =
    actors * num_envs, and the schedule is not used.
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
    """Double Q-learning (arXiv 1509.06461): the online network chooses the action that the target
    network values.
    """
    duelling: bool = True
    """Value and advantages apart (arXiv 1511.06581)."""
    huber_delta: PositiveFloat | None = 1.0
    """Errors above it count linearly; None: all errors squared."""
    target_update_updates: PositiveInt = 500
    """The target network becomes the online one every so many updates."""
    epsilon_start: Fraction = 1.0
    """Share of random actions at first."""
    epsilon_end: Fraction = 0.05
    """Share of random actions in the end."""
    epsilon_updates: Updates = 10_000
    """Epsilon falls on a straight line from start to end over so many updates."""
    epsilon_base: Fraction | None = None
    """An epsilon for each environment (Ape-X), as above, instead of the schedule; None: the
    schedule.
    """
    epsilon_alpha: Annotated[float, Field(ge=0.0)] = 7.0
    """How far those epsilons are spread."""

    @property
    def recorded(self) -> tuple[str, ...]:
        return "q_taken", "q_max"

    def exploration(self, updates: int) -> dict[str, float]:
        """``epsilon`` and ``alpha`` of epsilon ** (1 + alpha * i / (M - 1)) after ``updates``
        updates; with the schedule alpha is 0.
        """
        if self.epsilon_base is not None:
            return {"epsilon": self.epsilon_base, "alpha": self.epsilon_alpha}
        return {
            "epsilon": between(self.epsilon_start, self.epsilon_end, updates, self.epsilon_updates),
            "alpha": 0.0,
        }


class DQNSettings(QSettings):
    """DQN (Nature 518, 2015) with the parts of Rainbow that matter most (arXiv 1710.02298): double,
    duelling, n-step, priorities.
    """

    name: Literal["dqn"] = "dqn"
    n_step: PositiveInt = 3


class R2D2Settings(QSettings):
    """R2D2 (Kapturowski et al., ICLR 2019): recurrent Q-learning from stored states, with burn-in.

    An item is ``burn_in`` steps that only bring the stored state up to date, and then ``unroll``
    steps that are learned from. A window that begins with its episode needs no burn-in, so all of
    its steps are learned from, and no step of an episode is left out.
    """

    name: Literal["r2d2"] = "r2d2"
    learning_rate: Rate = 1e-4
    discount: Fraction = 0.997
    adam_epsilon: PositiveFloat = 1e-3
    batch_size: PositiveInt = 64
    n_step: PositiveInt = 5
    huber_delta: PositiveFloat | None = None
    burn_in: Annotated[int, Field(ge=0)] = 40
    """Steps that only bring the stored state up to date."""
    unroll: PositiveInt = 40
    """Steps of an item that are learned from."""
    overlap: Annotated[int, Field(ge=0)] = 0
    """Learned steps that two adjacent items share; 0: every step of an episode is learned from in
    exactly one item.
    """
    value_rescaling: PositiveFloat | None = 1e-3
    """epsilon of h(x) = sign(x)(sqrt(|x| + 1) - 1) + epsilon x (arXiv 1805.11593); None: returns as
    they are.
    """
    priority_eta: Fraction = 0.9
    """Share of the largest error in the priority of an item; the rest is their mean."""

    @property
    def window(self) -> tuple[int, int]:
        return self.burn_in + self.unroll, self.unroll - self.overlap

    @model_validator(mode="after")
    def _windows_move_on(self) -> R2D2Settings:
        if self.overlap >= self.unroll:
            raise ValueError(
                f"overlap = {self.overlap} is not below unroll = {self.unroll}: the next item "
                "would never begin later"
            )
        return self


class ContinuousSettings(OffPolicySettings):
    """What SAC and TD3 share: two critics, and targets that follow slowly."""

    live: ClassVar[tuple[str, ...]] = (*OffPolicySettings.live, "target_smoothing")

    learning_rate: Rate = 3e-4
    """Of actor and critics, and of SAC's temperature."""
    adam_epsilon: PositiveFloat = 1e-8
    target_smoothing: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """Share of the way that the target networks go towards the online ones at every step of theirs.
    """


class SACSettings(ContinuousSettings):
    """SAC with automatic temperature (arXiv 1812.05905). With ``n_step`` above 1 the entropy of
    steps in between is not counted.
    """

    name: Literal["sac"] = "sac"
    initial_temperature: PositiveFloat = 1.0
    """Weight of the entropy at first."""
    target_entropy: float | Literal["auto"] | None = "auto"
    """In nats, of actions scaled to -1..1; auto: minus their number of components; None: the
    temperature stays as it is.
    """


class TD3Settings(ContinuousSettings):
    """TD3 (arXiv 1802.09477). Standard deviations are in units of half the range of an action."""

    live: ClassVar[tuple[str, ...]] = (
        *ContinuousSettings.live,
        "noise_start",
        "noise_end",
        "noise_updates",
    )

    name: Literal["td3"] = "td3"
    policy_delay: PositiveInt = 2
    """Actor and targets move every so many updates."""
    target_noise: Annotated[float, Field(ge=0.0)] = 0.2
    """Deviation of the noise on the target's actions."""
    target_noise_clip: Annotated[float, Field(ge=0.0)] = 0.5
    """Largest noise on them."""
    noise_start: Annotated[float, Field(ge=0.0)] = 0.1
    """Deviation of exploration noise at first."""
    noise_end: Annotated[float, Field(ge=0.0)] = 0.1
    """Deviation of exploration noise in the end."""
    noise_updates: Updates = 0
    """Exploration noise goes on a straight line from start to end over so many updates."""

    def exploration(self, updates: int) -> dict[str, float]:
        """``noise_std`` after ``updates`` updates."""
        return {"noise_std": between(self.noise_start, self.noise_end, updates, self.noise_updates)}


def check(config: Config, spec: EnvironmentSpec) -> list[Problem]:
    """Why the algorithm cannot learn this environment with this network from replay; empty when it
    can, or is of another kind.
    """
    if not isinstance(config.algorithm, OffPolicySettings):
        return []
    name = config.algorithm.name
    found = (
        _check_values(name, spec)
        if isinstance(config.algorithm, QSettings)
        else _check_bounds(name, spec)
    )
    return [*found, *_check_network(config), *_check_normalisation(config)]


def _check_values(name: str, spec: EnvironmentSpec) -> list[Problem]:
    """Values of actions need one finite choice."""
    kind = spec.action.kind
    if kind == "discrete":
        return []
    why = (
        "infinitely many"
        if kind == "box"
        else f"{math.prod(spec.action.categories)} combinations of"
    )
    message = (
        f"learns one value for each action, and {spec.id} has {why} actions ({kind} "
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


def _check_bounds(name: str, spec: EnvironmentSpec) -> list[Problem]:
    """A squashed action needs a range to be squashed into."""
    action = spec.action
    if action.kind != "box":
        message = (
            f"moves continuous actions along a gradient, and the actions of {spec.id} are "
            f"{action.kind}"
        )
        return [
            Problem(
                "algorithm.name",
                name,
                message,
                "dqn or r2d2" if action.kind == "discrete" else "ppo, impala or a2c",
            )
        ]
    if all(
        math.isfinite(high - low) and low < high
        for low, high in zip(action.low, action.high, strict=True)
    ):
        return []
    message = (
        f"squashes actions into their range, and an action of {spec.id} has no bounds with "
        "room between them"
    )
    return [
        Problem(
            "algorithm.name", name, message, "ppo, impala or a2c, or a wrapper that bounds actions"
        )
    ]


def _check_network(config: Config) -> list[Problem]:
    network, name = config.network, config.algorithm.name
    problems = []
    if network.name not in NETWORKS:
        message = (
            f"{name} builds value networks on a built-in torso, and cannot take a network "
            "that gives a policy and a value"
        )
        problems.append(Problem("network.name", network.name, message, ", ".join(NETWORKS)))
    if name == "r2d2" and not network.lstm:
        problems.append(
            Problem(
                "network.lstm",
                0,
                "r2d2 without memory would warm up a state that does not exist",
                "at least 1, or dqn",
            )
        )
    if name != "r2d2" and network.lstm:
        problems.append(
            Problem(
                "network.lstm",
                network.lstm,
                f"{name} has no memory, so nothing would be remembered",
                "0, or r2d2",
            )
        )
    if network.share_torso:
        message = (
            f"there is nothing to share: the networks of {name} are learned from different losses"
        )
        problems.append(Problem("network.share_torso", True, message, "false"))
    if "log_std" in network.kwargs:
        message = f"{name} has no standard deviation apart from what its network computes"
        problems.append(
            Problem("network.kwargs.log_std", network.kwargs["log_std"], message, "nothing")
        )
    return problems


def _check_normalisation(config: Config) -> list[Problem]:
    if not config.env.normalisation.returns:
        return []
    message = (
        "what is replayed was rewarded under an older scale, so one value would be learned "
        "in several units"
    )
    accepted = "false" + (
        "; value_rescaling tames large returns"
        if isinstance(config.algorithm, R2D2Settings)
        else ""
    )
    return [Problem("env.normalisation.returns", True, message, accepted)]
