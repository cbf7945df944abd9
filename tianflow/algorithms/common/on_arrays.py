"""Actor step on NumPy arrays, for small networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from tianflow.networks.arrays import ArrayMlp
from tianflow.ops.distributions import ActionDistribution

Array = NDArray[Any]
MAX_PRODUCTS = 5_000_000
"""Multiplications per step up to which arrays are faster than PyTorch."""


class ActOnArrays:
    """`ActorCriticPolicy.act` with noise, on arrays; `tianflow.interfaces.ArrayStep`.

    Args:
        network: computes the parameters of the action distribution.
        distribution: samples actions.
    """

    def __init__(self, network: ArrayMlp, distribution: ActionDistribution) -> None:
        self._network, self._distribution, self.size = network, distribution, network.size

    def is_faster(self, num_envs: int) -> bool:
        """True if a step of ``num_envs`` environments is faster than in PyTorch."""
        return num_envs * self._network.products <= MAX_PRODUCTS

    def refresh(self) -> None:
        """Copy overwritten weights."""
        self._network.refresh()

    def __call__(
        self,
        observation: Mapping[str, NDArray[Any]],
        noise: NDArray[Any],
        parameters: NDArray[Any],
        action: NDArray[Any],
    ) -> None:
        self._network(observation, parameters)
        self._distribution.choose(parameters, noise, action)

    def record(self, parameters: NDArray[Any], action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        """``log_prob`` [...] of stored actions [..., *stored], given parameters [..., P]."""
        return {"log_prob": self._distribution.log_prob_on_arrays(parameters, action)}
