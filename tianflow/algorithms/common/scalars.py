"""Statistics of an update as numbers: one transfer from the device for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Statistics: TypeAlias = dict[str, Tensor | float]
"""Statistics of an update by name; a tensor has one element."""


def is_scalar(value: object) -> bool:
    """True for a real tensor of one element, whatever its shape."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _as_scalar(value: Tensor) -> Tensor:
    """``value`` as a float32 without dimensions. Most are already, and calls cost time."""
    if value.dtype == torch.float32 and value.dim() == 0:
        return value
    return value.float().reshape(())


def as_numbers(found: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """``found`` with a float in place of each tensor of one element. A subclass of an algorithm may
    add values of its own: anything else stays as it is, and `tianflow.core.learning` refuses what
    is not a number.

    Args:
        found: values by name; tensors on ``device`` are read together.
        device: of the learner.
    """
    scalars = {name: value.detach() for name, value in found.items() if is_scalar(value)}
    here = {name: _as_scalar(value) for name, value in scalars.items() if value.device == device}
    numbers = torch.stack(list(here.values())).tolist() if here else []
    elsewhere = {name: float(value) for name, value in scalars.items() if name not in here}
    return {**found, **elsewhere, **dict(zip(here, numbers, strict=True))}
