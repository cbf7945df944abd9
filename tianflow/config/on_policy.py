"""Settings of algorithms that use each trajectory once, and the base of all algorithm settings.

Settings of algorithms that learn from replay are in `tianflow.config.off_policy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tianflow.config.schedules import ScheduledPositive, ScheduledRate
from tianflow.config.section import Fraction, Section

if TYPE_CHECKING:
    from tianflow.core.payloads import ActionSpec


class AlgorithmSettings(Section):
    """Settings of every algorithm. The settings model of a plug-in derives from this class."""

    live: ClassVar[tuple[str, ...]] = ("learning_rate", "entropy_cost", "batch_trajectories")
    """Settings that may change during a run."""
    previous_step: ClassVar[bool] = False
    """Default of ``network.previous_step``."""
    measures_divergence: ClassVar[bool] = False
    """True if the learner is a `tianflow.interfaces.MeasuresDivergence`."""
    splits_over_ranks: ClassVar[bool] = False
    """True if the learner is a `tianflow.interfaces.SplitsOverRanks`."""
    fixed_shapes: ClassVar[bool] = False
    """True if the update may be a CUDA graph. Its learner is a
    `tianflow.algorithms.common.single_pass.SinglePassLearner`, or a
    `tianflow.algorithms.common.off_policy.OffPolicyLearner`, and computes with tensors only.
    """

    ends_only: ClassVar[bool] = False
    """True if an update reads of a replay item only the first and the last observation (and mask):
    a draw then carries no others.
    """

    name: str
    """Algorithm: a2c, dqn, impala, ppo, r2d2, sac, td3, another installed one, or
    module:attribute.
    """
    learning_rate: ScheduledRate = 2.5e-4
    """Learning rate of Adam, or its schedule."""
    discount: Fraction = 0.99
    """Discount per step (gamma)."""
    entropy_cost: ScheduledRate = 0.0
    """Weight of the policy's entropy in the loss, or its schedule."""
    value_cost: Annotated[float, Field(ge=0.0)] = 0.5
    """Weight of the value loss."""
    max_grad_norm: PositiveFloat = 0.5
    """Largest norm of the gradient. Larger gradients are scaled down."""
    adam_epsilon: PositiveFloat = 1e-5
    """Term in the denominator of Adam (epsilon)."""
    batch_trajectories: PositiveInt = 1
    """Number of trajectories in one update (B)."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """Schedule of a learning rate that is a number. linear: decreases to 0 over the first limit
    that is set of ``run.max_env_steps``, ``run.max_updates`` and ``run.max_seconds``. A table in
    ``learning_rate`` takes precedence.
    """

    @property
    def window(self) -> tuple[int, int] | None:
        """(length, period) of replay items, in steps; None for algorithms that use each trajectory
        once.
        """
        return None

    @property
    def items(self) -> int:
        """Number of items that replay draws for one update; 0 for algorithms that use each
        trajectory once.
        """
        return int(getattr(self, "batch_size", 0))

    @property
    def recorded(self) -> tuple[str, ...]:
        """Fields [T, N] float32 that the policy adds to a trajectory; see
        `tianflow.interfaces.Policy.record`.
        """
        return ("log_prob",)

    def noise_size(self, action: ActionSpec) -> int:
        """K, the random numbers that the policy draws for one action; see
        `tianflow.interfaces.Policy.noise`. Central inference reserves memory for them.
        """
        return action.noise_size


class PPOSettings(AlgorithmSettings):
    """PPO (arXiv 1707.06347), with the decoupled objective (arXiv 2110.00641) for stale data."""

    measures_divergence: ClassVar[bool] = True
    splits_over_ranks: ClassVar[bool] = True

    name: str = "ppo"
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation (arXiv 1506.02438); 1: full returns, 0: one
    step.
    """
    clip: ScheduledPositive = 0.2
    """Clip range of the probability ratio, 1 - clip to 1 + clip, or its schedule."""
    value_clip: PositiveFloat | None = None
    """Largest change of a value from the old one; None: without limit."""
    epochs: PositiveInt = 4
    """Number of passes over each batch."""
    minibatch_size: PositiveInt = 256
    """Number of samples in one optimiser step."""
    normalise_advantages: bool = True
    """Normalisation of advantages to mean 0 and deviation 1 over the batch."""
    decoupled: bool = True
    """Clip range around the newest policy, with weights for stale samples; False: plain PPO."""
    max_behaviour_weight: PositiveFloat = 2.0
    """Largest weight of a stale sample (decoupled)."""
    target_kl: PositiveFloat | None = None
    """Largest KL divergence from the old policy, in nats. A larger one skips the remaining passes.
    None: without limit.
    """


class ImpalaSettings(AlgorithmSettings):
    """IMPALA: V-trace actor-critic (arXiv 1802.01561)."""

    measures_divergence: ClassVar[bool] = True
    splits_over_ranks: ClassVar[bool] = True
    fixed_shapes: ClassVar[bool] = True

    name: str = "impala"
    entropy_cost: ScheduledRate = 0.01
    vtrace_lambda: Fraction = 1.0
    """Lambda of V-trace targets; 1: full n-step returns."""
    rho_bar: PositiveFloat = 1.0
    """Largest importance weight in a temporal difference of V-trace."""
    c_bar: PositiveFloat = 1.0
    """Largest importance weight in the trace of V-trace."""
    pg_rho_bar: PositiveFloat = 1.0
    """Largest importance weight in the policy gradient."""
    normalise_advantages: bool = False
    """Normalisation of advantages to mean 0 and deviation 1 over the batch."""

    @model_validator(mode="after")
    def _limits_converge(self) -> ImpalaSettings:
        if self.c_bar > self.rho_bar:
            raise ValueError(
                f"c_bar = {self.c_bar} is above rho_bar = {self.rho_bar}: V-trace might not "
                "converge; lower c_bar"
            )
        return self


class A2CSettings(AlgorithmSettings):
    """A2C: n-step advantage actor-critic objective (arXiv 1602.01783), on trajectories from
    actors.
    """

    measures_divergence: ClassVar[bool] = True
    splits_over_ranks: ClassVar[bool] = True
    fixed_shapes: ClassVar[bool] = True

    name: str = "a2c"
    learning_rate: ScheduledRate = 7e-4
    entropy_cost: ScheduledRate = 0.01
    normalise_advantages: bool = False
    """Normalisation of advantages to mean 0 and deviation 1 over the batch."""
