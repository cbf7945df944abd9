"""Plug-in networks, one that fits CartPole and some that do not: ``tests.support.networks:Name``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tianflow.config.model import NetworkSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks import Network, Output


class Fitting(Network):
    """Linear policy and value of CartPole's observations."""

    inputs, outputs = 4, 2

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(self.inputs, self.outputs), nn.Linear(self.inputs, 1)

    def forward(self, observation: Any, state: Any, start: Tensor) -> Output:
        x = observation[""]
        return Output(self.policy(x), self.value(x).squeeze(-1), {})


class Narrow(Fitting):
    """One logit for two actions."""

    outputs = 1


class Unsqueezed(Fitting):
    """Values with an axis of their own."""

    def forward(self, observation: Any, state: Any, start: Tensor) -> Output:
        x = observation[""]
        return Output(self.policy(x), self.value(x), {})


class Misfit(Fitting):
    """Layers for more inputs than there are."""

    inputs = 7


class Forgetful(Fitting):
    """Declares a state that it does not return."""

    @staticmethod
    def state_spec(settings: NetworkSettings) -> dict[str, tuple[int, ...]]:
        return {"memory": (3,)}


class Undeclared(Fitting):
    """Reads a state that it does not declare."""

    def forward(self, observation: Any, state: Any, start: Tensor) -> Output:
        return super().forward(observation, {"h": state["h"]}, start)


class Unmakeable(Fitting):
    """Needs a setting that is missing."""

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec) -> None:
        super().__init__(settings, spec)
        self.units = settings.kwargs["units"]
