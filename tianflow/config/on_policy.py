"""Settings of the algorithms that use each trajectory once, and what all settings share. No
PyTorch.

Those that learn from replay are in `tianflow.config.off_policy`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are final."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class AlgorithmSettings(Section):
    """What every algorithm has. A plug-in's own settings model derives from this."""

    live: ClassVar[tuple[str, ...]] = ("learning_rate", "entropy_cost", "batch_trajectories")
    """Those that may change while a run goes on."""

    name: str
    """a2c, dqn, impala, ppo, r2d2, sac, td3, another installed one, or module:attribute."""
    learning_rate: Annotated[float, Field(ge=0.0)] = 2.5e-4
    """Step size of Adam."""
    discount: Fraction = 0.99
    """Weight of what comes one step later."""
    entropy_cost: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the policy's entropy in the loss."""
    value_cost: Annotated[float, Field(ge=0.0)] = 0.5
    """Weight of the value's loss."""
    max_grad_norm: PositiveFloat = 0.5
    """The gradient is scaled down to this norm."""
    adam_epsilon: PositiveFloat = 1e-5
    """Added to the denominator of Adam."""
    batch_trajectories: PositiveInt = 1
    """Trajectories that one update uses."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """linear: falls to 0 over ``run.max_env_steps``."""

    @property
    def window(self) -> tuple[int, int] | None:
        """(length, period) in steps of what replay draws; None for an algorithm that uses each
        trajectory once.
        """
        return None

    @property
    def items(self) -> int:
        """Windows that replay draws for one update: ``batch_size``; 0 for an algorithm that uses
        each trajectory once.
        """
        return int(getattr(self, "batch_size", 0))

    @property
    def recorded(self) -> tuple[str, ...]:
        """Fields [T, N] float32 that the policy adds to a trajectory; see
        `tianflow.interfaces.Policy.record`.
        """
        return ("log_prob",)


class PPOSettings(AlgorithmSettings):
    """PPO (arXiv 1707.06347), with the decoupled objective (arXiv 2110.00641) for stale data."""

    name: Literal["ppo"] = "ppo"
    gae_lambda: Fraction = 0.95
    """Of generalised advantage estimation (arXiv 1506.02438); 1: returns as they were, 0: one step.
    """
    clip: PositiveFloat = 0.2
    """The ratio to the old policy counts between 1 - clip and 1 + clip."""
    value_clip: PositiveFloat | None = None
    """A value may move so far from its old one; None: as far as it likes."""
    epochs: PositiveInt = 4
    """Passes over each batch."""
    minibatch_size: PositiveInt = 256
    """Samples in one optimiser step."""
    normalise_advantages: bool = True
    """To mean 0 and deviation 1 over the batch."""
    decoupled: bool = True
    """The clip is around the newest policy, and stale samples are weighted; False: plain PPO."""
    max_behaviour_weight: PositiveFloat = 2.0
    """Decoupled: largest weight of a stale sample."""
    target_kl: PositiveFloat | None = None
    """No further pass once the policy has moved so far, in nats; None: all passes."""


class ImpalaSettings(AlgorithmSettings):
    """IMPALA's V-trace actor-critic (arXiv 1802.01561)."""

    name: Literal["impala"] = "impala"
    entropy_cost: Annotated[float, Field(ge=0.0)] = 0.01
    vtrace_lambda: Fraction = 1.0
    """Of V-trace's targets; 1: whole n-step returns."""
    rho_bar: PositiveFloat = 1.0
    """Largest importance weight in a temporal difference of V-trace."""
    c_bar: PositiveFloat = 1.0
    """Largest importance weight of the trace."""
    pg_rho_bar: PositiveFloat = 1.0
    """Largest importance weight in the policy's gradient."""
    normalise_advantages: bool = False
    """To mean 0 and deviation 1 over the batch."""

    @model_validator(mode="after")
    def _limits_converge(self) -> ImpalaSettings:
        if self.c_bar > self.rho_bar:
            raise ValueError(
                f"c_bar = {self.c_bar} is above rho_bar = {self.rho_bar}: V-trace need not "
                "converge then; lower c_bar"
            )
        return self


class A2CSettings(AlgorithmSettings):
    """A3C's n-step advantage actor-critic objective (arXiv 1602.01783), trajectories shipped
    instead of gradients.
    """

    name: Literal["a2c"] = "a2c"
    learning_rate: Annotated[float, Field(ge=0.0)] = 7e-4
    entropy_cost: Annotated[float, Field(ge=0.0)] = 0.01
    normalise_advantages: bool = False
    """To mean 0 and deviation 1 over the batch."""
