"""Settings of the algorithms that use each trajectory once, and what all settings share. No PyTorch.

Those that learn from replay are in `tianflow.off_policy_settings`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are final."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class AlgorithmSettings(Section):
    """What every algorithm has. A plug-in's own settings model derives from this."""

    live: ClassVar[tuple[str, ...]] = ("learning_rate", "entropy_cost", "batch_trajectories")
    """Those that may change while a run goes on."""

    name: str
    learning_rate: Annotated[float, Field(ge=0.0)] = 2.5e-4
    """Step size of Adam."""
    discount: Fraction = 0.99
    entropy_cost: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the policy's entropy in the loss."""
    value_cost: Annotated[float, Field(ge=0.0)] = 0.5
    max_grad_norm: PositiveFloat = 0.5
    adam_epsilon: PositiveFloat = 1e-5
    batch_trajectories: PositiveInt = 1
    """Trajectories that one update uses."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"

    @property
    def window(self) -> tuple[int, int] | None:
        """(length, period) in steps of what replay draws; None for an algorithm that uses each trajectory once."""
        return None

    @property
    def items(self) -> int:
        """Windows that replay draws for one update: ``batch_size``; 0 for an algorithm that uses each trajectory once."""
        return int(getattr(self, "batch_size", 0))

    @property
    def recorded(self) -> tuple[str, ...]:
        """Fields [T, N] float32 that the policy adds to a trajectory; see `tianflow.interfaces.Policy.record`."""
        return ("log_prob",)


class PPOSettings(AlgorithmSettings):
    """PPO (arXiv 1707.06347), with the decoupled objective (arXiv 2110.00641) for stale data."""

    name: Literal["ppo"] = "ppo"
    gae_lambda: Fraction = 0.95
    clip: PositiveFloat = 0.2
    value_clip: PositiveFloat | None = None
    epochs: PositiveInt = 4
    minibatch_size: PositiveInt = 256
    normalise_advantages: bool = True
    decoupled: bool = True
    max_behaviour_weight: PositiveFloat = 2.0
    target_kl: PositiveFloat | None = None


class ImpalaSettings(AlgorithmSettings):
    """IMPALA's V-trace actor-critic (arXiv 1802.01561)."""

    name: Literal["impala"] = "impala"
    entropy_cost: Annotated[float, Field(ge=0.0)] = 0.01
    vtrace_lambda: Fraction = 1.0
    rho_bar: PositiveFloat = 1.0
    c_bar: PositiveFloat = 1.0
    pg_rho_bar: PositiveFloat = 1.0
    normalise_advantages: bool = False

    @model_validator(mode="after")
    def _limits_converge(self) -> ImpalaSettings:
        if self.c_bar > self.rho_bar:
            raise ValueError(f"c_bar = {self.c_bar} is above rho_bar = {self.rho_bar}: V-trace need not converge then; lower c_bar")
        return self


class A2CSettings(AlgorithmSettings):
    """A3C's n-step advantage actor-critic objective (arXiv 1602.01783), trajectories shipped instead of gradients."""

    name: Literal["a2c"] = "a2c"
    learning_rate: Annotated[float, Field(ge=0.0)] = 7e-4
    entropy_cost: Annotated[float, Field(ge=0.0)] = 0.01
    normalise_advantages: bool = False
