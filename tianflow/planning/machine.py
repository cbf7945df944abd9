"""Checks of a config against the machine that starts its run: its GPUs, and its launcher's needs.

They are not rules of configs: a policy that was trained on a GPU may be loaded elsewhere.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from tianflow import plugins
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config
from tianflow.core import devices
from tianflow.errors import ConfigError, Problem

if TYPE_CHECKING:
    from tianflow.interfaces import Launcher


def load_launcher(config: Config) -> Launcher:
    """The launcher that ``config`` names. ConfigError if the name is unknown."""
    factory: Any = plugins.load(
        "tianflow.launchers", config.placement.launcher, path="placement.launcher"
    )
    return cast("Launcher", factory())


def require_machine(config: Config, launcher: Launcher) -> None:
    """Raise ConfigError if this machine lacks a GPU that a run of ``config`` needs."""
    _require_device("learner.device", config.learner.device, launcher.capabilities.on_gpu)
    _require_gpus_for_ranks(config)
    if config.learner.graphs == "on" and not devices.HAS_GPU:
        message = "this machine has no NVIDIA GPU"
        raise ConfigError([Problem("learner.graphs", "on", message, "auto, or off")])
    if config.central:
        _require_device("inference.device", config.inference.device)
        _require_policy_on_device(config)


def start_problems(config: Config) -> list[Problem]:
    """Problems with which a start of ``config`` on this machine would end."""
    try:
        launcher = load_launcher(config)
        require_machine(config, launcher)
        if launcher.capabilities.processes:  # another one imports PyTorch
            launcher.prepare()
    except ConfigError as error:
        return list(error.problems)
    return []


def _require_device(path: str, device: str, elsewhere: str = "") -> None:
    """Refuse a GPU that this machine does not have. ``elsewhere``: see
    `LauncherCapabilities.on_gpu`.
    """
    if device.startswith("cuda") and not devices.HAS_GPU:
        message = "this machine has no NVIDIA GPU"
        accepted = elsewhere or "auto, cpu, or a machine with a GPU"
        raise ConfigError([Problem(path, device, message, accepted)])
    number, count = device.removeprefix("cuda:"), devices.GPUS
    if number.isdecimal() and count and int(number) >= count:
        message = f"this machine has {count} GPU{'s' * (count > 1)}, which are numbered from 0"
        raise ConfigError([Problem(path, device, message, f"cuda:0 to cuda:{count - 1}")])


def _require_gpus_for_ranks(config: Config) -> None:
    """Refuse more ranks than GPUs if the learner is to run on GPUs."""
    ranks, count = config.learner.ranks, devices.GPUS
    if ranks > 1 and config.learner.device.startswith("cuda") and count and ranks > count:
        message = f"each rank needs a GPU, and this machine has {count}"
        accepted = f"1 to {count}, or learner.device = cpu"
        raise ConfigError([Problem("learner.ranks", ranks, message, accepted)])


def _require_policy_on_device(config: Config) -> None:
    """Refuse a plug-in algorithm whose policy exists on a CPU only, if servers would ask for
    another device.
    """
    device, name = config.inference.device, config.algorithm.name
    if device == "cpu" or not devices.HAS_GPU or name in BUILT_IN_ALGORITHMS:
        return
    factory: Any = plugins.load("tianflow.algorithms", name, path="algorithm.name")
    try:
        inspect.signature(factory.make_policy).bind(config, None, None)
    except TypeError:
        message = f"make_policy of {name} takes no device, so its policy works on a CPU only"
        raise ConfigError([Problem("inference.device", device, message, "cpu")]) from None
