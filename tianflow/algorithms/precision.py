"""How a learner calls its networks: as they are, or in bfloat16 where that is cheaper. What comes out is float32 either way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from tianflow.logs import logger

Given = ParamSpec("Given")
Found = TypeVar("Found")
CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""What /proc/cpuinfo calls arithmetic in bfloat16, on x86 and on ARM."""


class Forward(Protocol):
    """Calls a network, or a method of one, with its arguments."""

    def __call__(self, network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs) -> Found: ...


def as_it_is(network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
    """In the precision of its parameters, float32."""
    return network(*args, **kwargs)


class InBfloat16:
    """A network's matrix products and convolutions in bfloat16 (autocast); its parameters and their gradients stay float32.

    THE GUARANTEE: autocast ends with the network, and all that it gave is cast up to float32. So log-probabilities, ratios,
    targets and losses are computed in float32, and bfloat16 is nowhere but between a network's layers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.type

    def __call__(self, network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        # Weights that were cast are kept until autocast ends: with one block for each call, never across an optimiser step.
        with torch.autocast(self._device, dtype=torch.bfloat16):
            found = network(*args, **kwargs)
        return cast("Found", raised(found))


def raised(found: Any) -> Any:
    """The same tensors, tuples and mappings, all bfloat16 tensors as float32; the gradient goes through."""
    if isinstance(found, Tensor):
        return found.float() if found.dtype == torch.bfloat16 else found
    if isinstance(found, Mapping):
        return {name: raised(part) for name, part in found.items()}
    if isinstance(found, tuple):
        parts = [raised(part) for part in found]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    return found


def forward_in(precision: Literal["fp32", "bf16"], device: torch.device) -> Forward:
    """How a learner on ``device`` calls its networks; where bfloat16 is legal but slow, the log says so."""
    if precision == "fp32":
        return as_it_is
    slow = why_slow(device)
    if slow:
        logger("learner").warning("learner.precision = bf16 computes as asked, but gains nothing here", reason=slow, instead="fp32")
    return InBfloat16(device)


def why_slow(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Why bfloat16 is emulated on ``device``; empty where the hardware has it."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
        return "" if fast else f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic, so it is emulated, slower than float32"
    try:
        found = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return f"{cpuinfo} cannot be read, so it is not known whether this CPU has bfloat16 arithmetic; emulated, it is slower than float32"
    if found and CPU_FLAGS & set(found[0].split()):
        return ""
    return "this CPU has neither avx512_bf16 nor amx_bf16, so bfloat16 is emulated, slower than float32"
