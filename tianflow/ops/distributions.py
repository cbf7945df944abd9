"""Action distributions, as functions of a parameter tensor ``[..., P]``.

Sampling uses noise drawn in advance, and no object is created per step. The actor draws the noise
of a whole trajectory at once and adds it step by step. The learner recomputes log-probabilities
with the same code, so on equal weights both agree to float32 rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tianflow.core.payloads import ActionSpec

MASKED_LOGIT = -1e9
"""Logit of a forbidden action.

Its probability is exactly 0 in float32. The logit is finite, so gradients and KL stay finite.
"""
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class ActionDistribution(Protocol):
    """Interface of `Categorical` and `DiagonalGaussian`. Leading axes are arbitrary.

    ``size``: P, number of parameters of one action. ``noise_size``: K, number of noise values of
    one action.
    """

    @property
    def size(self) -> int: ...
    @property
    def noise_size(self) -> int: ...
    def noise(self, shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
        """Noise for ``sample``: float32 [*shape, K]."""

    def masked(self, parameters: Tensor, mask: Tensor | None) -> Tensor:
        """Parameters with which actions have probability 0 where ``mask`` is False.

        ``mask`` is bool [..., sum of categories].
        """

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """Parts of ``parameters`` by name."""

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor: ...
    def choose(self, parameters: NDArray[Any], noise: NDArray[Any], out: NDArray[Any]) -> None:
        """`sample` on arrays, written to ``out`` [..., *stored]. ``noise`` is overwritten."""

    def mode(self, parameters: Tensor) -> Tensor:
        """The most probable action."""

    def evaluate(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of ``action`` and entropy, in nats, both [...]."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor: ...
    def log_prob_on_arrays(self, parameters: NDArray[Any], action: NDArray[Any]) -> NDArray[Any]:
        """`log_prob` of arrays, float32 [...]."""

    def entropy(self, parameters: Tensor) -> Tensor: ...
    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """KL(p || q) in nats, exact, from two parameter tensors."""


@dataclass(frozen=True, slots=True)
class Categorical:
    """One or several independent categorical choices. Parameters are their concatenated logits.

    ``scalar``: one choice, actions are int64 [...]; otherwise int64 [..., K].
    """

    categories: tuple[int, ...]
    scalar: bool

    @property
    def size(self) -> int:
        return sum(self.categories)

    @property
    def noise_size(self) -> int:
        return self.size

    def noise(self, shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
        """Gumbel noise: minus the logarithm of exponential noise."""
        exponential = generator.standard_exponential((*shape, self.size), dtype=np.float32)
        np.maximum(exponential, np.finfo(np.float32).tiny, out=exponential)
        np.log(exponential, out=exponential)
        return torch.from_numpy(np.negative(exponential, out=exponential))

    def masked(self, parameters: Tensor, mask: Tensor | None) -> Tensor:
        return parameters if mask is None else parameters.masked_fill(~mask, MASKED_LOGIT)

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """``logits`` [..., P]."""
        return {"logits": parameters}

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return self.mode(parameters + noise)

    def choose(self, parameters: NDArray[Any], noise: NDArray[Any], out: NDArray[Any]) -> None:
        np.add(parameters, noise, out=noise)
        if self.scalar:
            noise.argmax(-1, out=out)
            return
        first = 0
        for k, count in enumerate(self.categories):
            out[..., k] = noise[..., first : first + count].argmax(-1)
            first += count

    def mode(self, parameters: Tensor) -> Tensor:
        if self.scalar:
            return parameters.argmax(-1)
        return torch.stack([head.argmax(-1) for head in self._heads(parameters)], -1)

    def evaluate(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        actions = action.unsqueeze(-1) if self.scalar else action
        results = []
        for k, head in enumerate(self._heads(parameters)):
            log_p = _log_softmax(head)
            results.append((_picked(log_p, actions[..., k]), -(log_p.exp() * log_p).sum(0)))
        return _sum([log_prob for log_prob, _ in results]), _sum(
            [entropy for _, entropy in results]
        )

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        actions = action.unsqueeze(-1) if self.scalar else action
        return _sum(
            [
                _picked(_log_softmax(head), actions[..., k])
                for k, head in enumerate(self._heads(parameters))
            ]
        )

    def log_prob_on_arrays(self, parameters: NDArray[Any], action: NDArray[Any]) -> NDArray[Any]:
        choices, actions = (
            parameters.reshape(-1, self.size).T,
            action.reshape(-1, len(self.categories)).T,
        )
        total, first = np.zeros(choices.shape[1], np.float32), 0
        for chosen, count in zip(actions, self.categories, strict=True):
            # [choices, ...], for the reason in `_log_softmax`
            log_p = choices[first : first + count].copy()
            log_p -= log_p.max(0)
            total += log_p.ravel().take(chosen * len(total) + np.arange(len(total)))
            total -= np.log(np.exp(log_p, out=log_p).sum(0))
            first += count
        return total.reshape(parameters.shape[:-1])

    def entropy(self, parameters: Tensor) -> Tensor:
        log_ps = [head.log_softmax(-1) for head in self._heads(parameters)]
        return _sum([-(log_p.exp() * log_p).sum(-1) for log_p in log_ps])

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        pairs = [
            (a.log_softmax(-1), b.log_softmax(-1))
            for a, b in zip(self._heads(p), self._heads(q), strict=True)
        ]
        return _sum([(log_p.exp() * (log_p - log_q)).sum(-1) for log_p, log_q in pairs])

    def _heads(self, parameters: Tensor) -> tuple[Tensor, ...]:
        return (
            (parameters,)
            if len(self.categories) == 1
            else torch.split(parameters, list(self.categories), -1)
        )


@dataclass(frozen=True, slots=True)
class DiagonalGaussian:
    """Independent normal components. Parameters are the concatenated means and log standard
    deviations.

    Actions are float32 [..., *shape], as sampled. The environment side clips them, because a
    clipped action has a different log-probability.
    """

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return 2 * self.noise_size

    @property
    def noise_size(self) -> int:
        return math.prod(self.shape)

    def noise(self, shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
        """Standard normal noise."""
        return torch.from_numpy(
            generator.standard_normal((*shape, self.noise_size), dtype=np.float32)
        )

    def masked(self, parameters: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002 - the protocol's signature
        """Unchanged: continuous actions have no mask."""
        return parameters

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """``mean`` and ``log_std``, both [..., *shape]."""
        mean, log_std = parameters.chunk(2, -1)
        return {"mean": self._shaped(mean), "log_std": self._shaped(log_std)}

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = parameters.chunk(2, -1)
        return self._shaped(torch.addcmul(mean, log_std.exp(), noise))

    def choose(self, parameters: NDArray[Any], noise: NDArray[Any], out: NDArray[Any]) -> None:
        np.multiply(noise, np.exp(parameters[..., self.noise_size :]), out=noise)
        np.add(noise, parameters[..., : self.noise_size], out=noise)
        out[...] = noise.reshape(out.shape)

    def mode(self, parameters: Tensor) -> Tensor:
        return self._shaped(parameters.chunk(2, -1)[0])

    def evaluate(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_prob(parameters, action), self.entropy(parameters)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        mean, log_std = parameters.chunk(2, -1)
        z = (action.reshape(mean.shape) - mean) * torch.exp(-log_std)
        return (-0.5 * z.square() - log_std - _HALF_LOG_2PI).sum(-1)

    def log_prob_on_arrays(self, parameters: NDArray[Any], action: NDArray[Any]) -> NDArray[Any]:
        mean, log_std = parameters[..., : self.noise_size], parameters[..., self.noise_size :]
        z = (action.reshape(mean.shape) - mean) * np.exp(-log_std)
        total: NDArray[Any] = (-0.5 * np.square(z) - log_std - np.float32(_HALF_LOG_2PI)).sum(-1)
        return total

    def entropy(self, parameters: Tensor) -> Tensor:
        return (parameters.chunk(2, -1)[1] + (0.5 + _HALF_LOG_2PI)).sum(-1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        mean_p, log_std_p = p.chunk(2, -1)
        mean_q, log_std_q = q.chunk(2, -1)
        spread = (log_std_p - log_std_q).mul(2.0).exp() + (
            (mean_p - mean_q) * torch.exp(-log_std_q)
        ).square()
        return (0.5 * (spread - 1.0) + log_std_q - log_std_p).sum(-1)

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat if len(self.shape) == 1 else flat.reshape(*flat.shape[:-1], *self.shape)


def distribution_for(action: ActionSpec) -> ActionDistribution:
    """The distribution of an action kind: categorical, or a diagonal Gaussian for a box."""
    if action.kind == "box":
        return DiagonalGaussian(action.shape)
    return Categorical(action.categories, scalar=action.kind == "discrete")


def _log_softmax(logits: Tensor) -> Tensor:
    """[..., choices] -> [choices, ...], several times faster than over a short last axis."""
    return logits.movedim(-1, 0).contiguous().log_softmax(0)


def _picked(log_p: Tensor, action: Tensor) -> Tensor:
    """[choices, ...] and int64 [...] -> log-probability of each action, [...]."""
    return log_p.gather(0, action.unsqueeze(0)).squeeze(0)


def _sum(terms: list[Tensor]) -> Tensor:
    """Sum of the heads' terms, without an operation for a single head."""
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
