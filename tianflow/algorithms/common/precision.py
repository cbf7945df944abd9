"""How networks are called: as they are, or in bfloat16 where that is cheaper. What comes out is
float32 either way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from tianflow.config.model import Config
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import ActsInBfloat16, Policy
from tianflow.logs import logger

Given = ParamSpec("Given")
Found = TypeVar("Found")
Module = TypeVar("Module", bound=nn.Module)
CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""What /proc/cpuinfo calls arithmetic in bfloat16, on x86 and on ARM."""


class Forward(Protocol):
    """Calls a network, or a method of one, with its arguments."""

    def __call__(
        self, network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Found: ...


def as_it_is(
    network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs
) -> Found:
    """In the precision of its parameters, float32."""
    return network(*args, **kwargs)


class Autocast:
    """A network's matrix products and convolutions in bfloat16 (autocast); its parameters and their
    gradients stay float32.

    THE GUARANTEE: autocast ends with the network, and all that it gave is cast up to float32. So
    log-probabilities, ratios, targets and losses are computed in float32, and bfloat16 is nowhere
    but between a network's layers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.type

    def __call__(
        self, network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Found:
        # Weights that were cast are kept until autocast ends: with one block for each call, never
        # across an optimiser step.
        with torch.autocast(self._device, dtype=torch.bfloat16):
            found = network(*args, **kwargs)
        return cast("Found", raised(found))


class ActingNetwork(Generic[Module]):
    """The network that a policy acts with, and how it is called: the policy's own, or a copy of it
    in bfloat16.

    The copy's weights are rounded once for each version, where autocast alone would round all of
    them again at every step.

    Attributes:
        network: to be called, or its methods, by ``forward``.
        forward: gives float32 either way.
    """

    def __init__(self, network: Module) -> None:
        self.network = self._own = network
        self.forward: Forward = as_it_is

    def in_bfloat16(self) -> None:
        """From now on."""
        self.network, self.forward = (
            deepcopy(self._own).to(torch.bfloat16),
            forward_in("bf16", torch.device("cpu"), whose="actors"),
        )

    def refresh(self) -> None:
        """The policy's own network has other weights."""
        if self.network is not self._own:
            for rounded, exact in zip(
                self.network.parameters(), self._own.parameters(), strict=True
            ):
                rounded.copy_(exact)


def raised(found: Any) -> Any:
    """The same tensors, tuples and mappings, all bfloat16 tensors as float32; the gradient goes
    through.
    """
    if isinstance(found, Tensor):
        return found.float() if found.dtype == torch.bfloat16 else found
    if isinstance(found, Mapping):
        return {name: raised(part) for name, part in found.items()}
    if isinstance(found, tuple):
        parts = [raised(part) for part in found]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    return found


def forward_in(
    precision: Literal["fp32", "bf16"],
    device: torch.device,
    whose: Literal["learner", "actors"] = "learner",
) -> Forward:
    """How networks on ``device`` are called; where bfloat16 is legal but slow, the log says so of
    the setting of ``whose``.
    """
    if precision == "fp32":
        return as_it_is
    slow = why_slow(device)
    if slow:
        logger(whose).warning(
            f"{whose}.precision = bf16 computes as asked, but gains nothing here",
            reason=slow,
            instead="fp32",
        )
    return Autocast(device)


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """A context of updates on ``device``.

    cuDNN rounds to 19 bits by default, and what the learner computes would then differ from what
    actors did.
    """
    return (
        nullcontext()
        if device.type == "cpu"
        else torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    )


def why_slow(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Why bfloat16 is emulated on ``device``; empty where the hardware has it."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
        return (
            ""
            if fast
            else f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic, so it is "
            "emulated, slower than float32"
        )
    try:
        found = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return (
            f"{cpuinfo} cannot be read, so it is not known whether this CPU has bfloat16 "
            "arithmetic; emulated, it is slower than float32"
        )
    if found and CPU_FLAGS & set(found[0].split()):
        return ""
    return (
        "this CPU has neither avx512_bf16 nor amx_bf16, so bfloat16 is emulated, slower than "
        "float32"
    )


def act_in(config: Config, policy: Policy) -> None:
    """Have an actor's ``policy`` compute as ``actors.precision`` says; ConfigError if it cannot."""
    if config.actors.precision == "fp32":
        return
    if not isinstance(policy, ActsInBfloat16):
        refused = f"the policy of {config.algorithm.name} has no act_in_bfloat16"
        raise ConfigError([Problem("actors.precision", config.actors.precision, refused, "fp32")])
    policy.act_in_bfloat16()
