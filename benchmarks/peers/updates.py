"""Updates of SAC, TD3 or DQN alone, by Stable-Baselines3 or SBX, from a filled replay buffer.

It answers each line of its input, seconds, with the rate of its updates; see
`benchmarks.lib.update_turns`. Networks have the given layers; all other settings are the library's
own.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from benchmarks.lib.update_turns import answer_turns

MODULES = {"sb3": "stable_baselines3", "sbx": "sbx"}
ENVS = {"sac": "Pendulum-v1", "td3": "Pendulum-v1", "dqn": "CartPole-v1"}
STORED, BATCH, AT_ONCE = 20_000, 256, 20


def fill(model: Any) -> None:
    """Fill the replay buffer with random transitions."""
    import numpy as np

    generator = np.random.default_rng(1)
    shape = (1, *model.observation_space.shape)
    discrete = hasattr(model.action_space, "n")
    for _ in range(STORED):
        before, after = generator.standard_normal((2, *shape)).astype("float32")
        action = (
            generator.integers(0, model.action_space.n, (1, 1))
            if discrete
            else generator.uniform(-1.0, 1.0, (1, *model.action_space.shape)).astype("float32")
        )
        reward, end = generator.standard_normal(1), generator.random(1) < 0.05
        model.replay_buffer.add(before, after, action, reward, end, [{}])


def main() -> None:
    """Arguments: ``sb3|sbx ALGORITHM DEVICE THREADS HIDDEN``. SBX chooses its own threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=list(MODULES))
    parser.add_argument("algorithm", choices=list(ENVS))
    parser.add_argument("device")
    parser.add_argument("threads", type=int)
    parser.add_argument("hidden", help="widths of the layers, such as 256,256")
    given = parser.parse_args()
    import torch
    from stable_baselines3.common.logger import Logger

    torch.set_num_threads(given.threads)
    options = {"device": given.device} if given.who == "sb3" else {}
    model = getattr(importlib.import_module(MODULES[given.who]), given.algorithm.upper())(
        "MlpPolicy",
        ENVS[given.algorithm],
        batch_size=BATCH,
        buffer_size=STORED,
        policy_kwargs={"net_arch": [int(width) for width in given.hidden.split(",")]},
        **options,
    )
    model.set_logger(Logger(None, []))
    fill(model)

    def updates() -> int:
        model.train(AT_ONCE, BATCH)
        return AT_ONCE

    wait = torch.cuda.synchronize if given.device.startswith("cuda") else lambda: None
    answer_turns(updates, wait=wait)


if __name__ == "__main__":
    main()
