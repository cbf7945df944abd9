"""Worker: updates of SAC, TD3 or DQN alone, by tianflow or by a plain loop in PyTorch.

It answers each line of its input, seconds, with the rate of its updates; see
`benchmarks.lib.update_turns`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.lib.machine import ROOT
from benchmarks.lib.update_turns import answer_turns

if TYPE_CHECKING:
    import torch

    from tianflow.interfaces import AlgorithmFactory

CONFIGS = {"sac": "pendulum_sac.toml", "td3": "pendulum_td3.toml", "dqn": "cartpole_dqn.toml"}
SIZES = {"sac": (3, 1), "td3": (3, 1), "dqn": (4, 2)}
"""Numbers of observations and actions."""


def overrides(algorithm: str, hidden: str, threads: int) -> tuple[str, ...]:
    """Settings that make the update that of Stable-Baselines3's defaults."""
    found = (
        f"network.hidden=[{hidden}]",
        f"learner.threads={threads}",
        "algorithm.batch_size=256",
        "algorithm.n_step=1",
        "env.normalisation.observations=false",
    )
    plain = ("algorithm.double=false", "algorithm.duelling=false")
    return (*found, *plain) if algorithm == "dqn" else found


def ours(config_file: Path, device: torch.device, settings: tuple[str, ...]) -> Callable[[], int]:
    """An update as a learner makes it: copy a draw out of its slot, train, lay weights out flat."""
    import numpy as np

    from tianflow import envs, plugins
    from tianflow.channels.memory import heap_arena
    from tianflow.components.stacking import DrawStacker
    from tianflow.config.loading import load_config
    from tianflow.planning.layouts import draw_layout

    config = load_config(config_file, settings)
    spec, generator = envs.probe(config), np.random.default_rng(1)
    layout = draw_layout(config, spec)
    assert layout is not None
    views = heap_arena(layout, 1).views(0)
    for name, view in views.items():
        if view.dtype == np.float32:
            view[...] = generator.standard_normal(view.shape, np.float32)
        elif name == "action":
            view[...] = generator.integers(0, 2, view.shape)
    views["valid"][...] = True
    views["terminated"][...] = generator.random(views["terminated"].shape) < 0.05
    views["weight"][...] = 1.0
    stacker = DrawStacker(layout=layout, device=device)
    factory = cast(
        "AlgorithmFactory",
        plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name"),
    )
    algorithm: Any = factory.make_learner(config, spec, device)
    algorithm.set_live(3e-4, 0.0)

    def update() -> int:
        stacker.fill(0, views, layout.steps)
        algorithm.set_settings(config.algorithm, algorithm.updates)
        found = algorithm.step(stacker.batch())
        if not found.finite:
            raise RuntimeError("the update was not finite and was undone, which is different work")
        algorithm.flat()
        return 1

    return update


def plain(
    algorithm: str, device: torch.device, hidden: list[int], *, compiled: bool
) -> Callable[[], int]:
    """An update of `benchmarks.lib.plain_updates`."""
    import torch

    from benchmarks.lib.plain_updates import UPDATES

    update = UPDATES[algorithm](
        *SIZES[algorithm], hidden, device, torch.compile if compiled else lambda function: function
    )

    def updates() -> int:
        update()
        return 1

    return updates


def main() -> None:
    """Arguments: ``tianflow|eager|compiled ALGORITHM DEVICE THREADS HIDDEN [--cache DIR]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=["tianflow", "eager", "compiled"])
    parser.add_argument("algorithm", choices=list(SIZES))
    parser.add_argument("device")
    parser.add_argument("threads", type=int)
    parser.add_argument("hidden", help="widths of the layers, such as 256,256")
    parser.add_argument("--cache", help="folder of what torch.compile has compiled")
    given = parser.parse_args()
    if given.cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = given.cache
    import torch

    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    if given.who == "tianflow":
        settings = overrides(given.algorithm, given.hidden, given.threads)
        updates = ours(ROOT / "configs" / CONFIGS[given.algorithm], device, settings)
    else:
        hidden = [int(width) for width in given.hidden.split(",")]
        updates = plain(given.algorithm, device, hidden, compiled=given.who == "compiled")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    answer_turns(updates, wait=wait, warm=20)


if __name__ == "__main__":
    main()
