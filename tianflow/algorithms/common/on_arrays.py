"""Acting on NumPy arrays with a network that is small enough for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from tianflow.networks.arrays import ArrayMlp
from tianflow.ops.distributions import ActionDistribution

Array = NDArray[Any]
MOST_PRODUCTS = 5_000_000
"""Multiplications of one step up to which arrays pay; above, arithmetic outweighs calls, and
PyTorch's is the quicker.
"""


class ActOnArrays:
    """`ActorCriticPolicy.act` with noise, on arrays; `tianflow.interfaces.ArrayStep`.

    Args:
        network: gives the parameters of the action distribution.
        distribution: chooses actions from them.
    """

    def __init__(self, network: ArrayMlp, distribution: ActionDistribution) -> None:
        self._network, self._distribution, self.size = network, distribution, network.size

    def pays(self, num_envs: int) -> bool:
        """Whether a step of so many environments is quicker than in PyTorch."""
        return num_envs * self._network.products <= MOST_PRODUCTS

    def refresh(self) -> None:
        """Follow weights that were overwritten."""
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
