"""Precision of network calls: float32, or where it is faster tf32 or bfloat16. Outputs are
float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from tianflow.config.model import Config, Precision
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import ActsInBfloat16, Policy
from tianflow.logs import logger

Given = ParamSpec("Given")
Found = TypeVar("Found")
Module = TypeVar("Module", bound=nn.Module)
CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names of bfloat16 arithmetic in /proc/cpuinfo, on x86 and ARM."""


class Forward(Protocol):
    """Calls a network, or a method of one, with its arguments."""

    def __call__(
        self, network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Found: ...


def in_float32(
    network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs
) -> Found:
    """Call in the precision of its parameters, float32."""
    return network(*args, **kwargs)


class Autocast:
    """Calls with matrix products and convolutions in bfloat16; parameters and gradients stay
    float32.

    THE GUARANTEE: autocast ends with the network call, and its outputs are converted to float32.
    Log-probabilities, ratios, targets and losses are therefore computed in float32; bfloat16 exists
    only between a network's layers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.type

    def __call__(
        self, network: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Found:
        # Cast weights are cached until autocast ends. One block per call never spans an optimiser
        # step.
        with torch.autocast(self._device, dtype=torch.bfloat16):
            found = network(*args, **kwargs)
        return cast("Found", to_float32(found))


class ActingNetwork(Generic[Module]):
    """The network of a policy and its call: the policy's own network, or a copy in bfloat16.

    The copy's weights are rounded once per version. Autocast alone would round them at every step.

    Attributes:
        network: network whose methods ``forward`` calls.
        forward: calls it; outputs are float32.
    """

    def __init__(self, network: Module, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008 - a device is immutable
        self.network, self._own, self._device = network, network, device
        self.forward: Forward = in_float32

    def in_bfloat16(self) -> None:
        """Use bfloat16 from now on."""
        self.network, self.forward = (
            deepcopy(self._own).to(torch.bfloat16),
            forward_in("bf16", self._device, whose="actors"),
        )

    def refresh(self) -> None:
        """Copy changed weights of the policy's own network."""
        if self.network is not self._own:
            for rounded, exact in zip(
                self.network.parameters(), self._own.parameters(), strict=True
            ):
                rounded.copy_(exact)


def to_float32(found: Any) -> Any:
    """Tensors, tuples and mappings with bfloat16 tensors converted to float32, with gradient."""
    if isinstance(found, Tensor):
        return found.float() if found.dtype == torch.bfloat16 else found
    if isinstance(found, Mapping):
        return {name: to_float32(part) for name, part in found.items()}
    if isinstance(found, tuple):
        parts = [to_float32(part) for part in found]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    return found


def forward_in(
    precision: Precision,
    device: torch.device,
    whose: Literal["learner", "actors"] = "learner",
) -> Forward:
    """The caller of networks on ``device``.

    It logs a warning for the setting of ``whose`` if ``precision`` is not faster there.
    """
    if precision == "fp32":
        return in_float32
    slow = slow_reason(device) if precision == "bf16" else no_tf32_reason(device)
    if slow:
        logger(whose).warning(
            f"{whose}.precision = {precision} is not faster on this hardware",
            reason=slow,
            instead="fp32",
        )
    return Autocast(device) if precision == "bf16" else in_float32


def arithmetic(device: torch.device, precision: Precision = "fp32") -> AbstractContextManager[None]:
    """Context of updates and inference on ``device``: whether float32 inputs of matrix products and
    convolutions are rounded to tf32.

    cuDNN rounds by default, and the learner's results would differ from the actors'.
    """
    return nullcontext() if device.type == "cpu" else _tf32(precision == "tf32")


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, allowed
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            yield
    finally:
        products.allow_tf32 = before


def no_tf32_reason(device: torch.device) -> str:
    """Reason why ``device`` has no tf32; empty if it has."""
    if device.type != "cuda":
        return "a CPU computes it in float32"
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return ""
    return f"{torch.cuda.get_device_name(device)} has no tf32 arithmetic and computes in float32"


def slow_reason(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Reason why bfloat16 is emulated on ``device``; empty if the hardware supports it."""
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
            f"{cpuinfo} cannot be read, so support of bfloat16 is unknown; emulated, it is slower "
            "than float32"
        )
    if found and CPU_FLAGS & set(found[0].split()):
        return ""
    return (
        "this CPU has neither avx512_bf16 nor amx_bf16, so bfloat16 is emulated, slower than "
        "float32"
    )


def set_acting_precision(
    config: Config, policy: Policy, section: Literal["actors", "inference"] = "actors"
) -> None:
    """Set the precision of ``policy`` to ``actors.precision``, or ``inference.precision``.

    Raises:
        ConfigError: the policy does not support it.
    """
    wanted: str = getattr(config, section).precision
    if wanted != "bf16":  # `arithmetic` rounds to tf32
        return
    if not isinstance(policy, ActsInBfloat16):
        refused = f"the policy of {config.algorithm.name} has no act_in_bfloat16"
        raise ConfigError([Problem(f"{section}.precision", wanted, refused, "fp32")])
    policy.act_in_bfloat16()
