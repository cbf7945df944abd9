"""PufferLib's own trainer with its own defaults, on CPU cores: CartPole-v1 for as many steps a second as it makes.

Its settings for CartPole are for Gymnasium's CartPole-v0 and name nothing of the algorithm, so it gets those of ``config/default.ini``; how
many environments there are, and in how many processes, are options. ``python -m benchmarks.peers.puffer_ppo cartpole ...``, with an
interpreter that has pufferlib. The clock starts with the first evaluation.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import gymnasium
import torch

from benchmarks.peers.common import Progress, Speaker, Task, read_task

DEFAULTS: dict[str, Any] = {
    "torch_deterministic": True,
    "cpu_offload": False,
    "optimizer": "muon",
    "anneal_lr": True,
    "precision": "float32",
    "total_timesteps": 10_000_000,
    "learning_rate": 0.015,
    "gamma": 0.995,
    "gae_lambda": 0.90,
    "update_epochs": 1,
    "clip_coef": 0.2,
    "vf_coef": 2.0,
    "vf_clip_coef": 0.2,
    "max_grad_norm": 1.5,
    "ent_coef": 0.001,
    "adam_beta1": 0.95,
    "adam_beta2": 0.999,
    "adam_eps": 1e-12,
    "batch_size": "auto",
    "minibatch_size": 8192,
    "max_minibatch_size": 32768,
    "bptt_horizon": 64,
    "compile": False,
    "compile_mode": "max-autotune-no-cudagraphs",
    "compile_fullgraph": True,
    "vtrace_rho_clip": 1.0,
    "vtrace_c_clip": 1.0,
    "prio_alpha": 0.8,
    "prio_beta0": 0.2,
}
"""As shipped with version 3.0."""
HIDDEN = 64
NEVER = 10**9


class Returns(gymnasium.Wrapper):
    """Tells the return of each episode with its last step."""

    def reset(self, **options: Any) -> Any:
        """Begin an episode."""
        self._return = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        """One step of the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        if terminated or truncated:
            info = {**info, "episode_return": self._return}
        return observation, reward, terminated, truncated, info


def environment(buf: Any = None, seed: int = 0) -> Any:
    """One environment, in PufferLib's wrapper."""
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env=Returns(gymnasium.make("CartPole-v1")), buf=buf, seed=seed)


def vector(task: Task) -> Any:
    """All of them: in this process, or in ``workers``, in which case half of them step while the other half is inferred."""
    from pufferlib import vector

    count, workers = int(task.options.get("envs", "1024")), int(task.options.get("workers", "0"))
    if not workers:
        return vector.make(environment, backend=vector.Serial, num_envs=count, seed=task.seed)
    options = {"num_workers": workers, "batch_size": count // 2, "zero_copy": True}
    return vector.make(environment, backend=vector.Multiprocessing, num_envs=count, seed=task.seed, **options)


def settings_of(task: Task, scratch: str) -> dict[str, Any]:
    """What the trainer is given."""
    horizon = int(task.options.get("horizon", DEFAULTS["bptt_horizon"]))
    own = {"name": "cartpole", "project": "cartpole", "env": "cartpole", "seed": task.seed, "device": "cpu", "use_rnn": False}
    return {**DEFAULTS, **own, "bptt_horizon": horizon, "data_dir": scratch, "checkpoint_interval": NEVER}


def train(task: Task, progress: Progress, scratch: str) -> None:
    """Until ``progress`` says so."""
    from pufferlib import models, pufferl

    pufferl.PuffeRL.print_dashboard = lambda *_, **__: None  # drawn ten times a second, for nobody
    environments = vector(task)
    trainer = pufferl.PuffeRL(settings_of(task, scratch), environments, models.Default(environments.driver_env, hidden_size=HIDDEN))
    progress.start()
    over = False
    while not over:
        trainer.evaluate()
        returns = list(trainer.stats["episode_return"])
        trainer.stats.clear()
        trainer.train()
        over = progress.look(trainer.global_step, returns)
    trainer.utilization.stop()
    environments.close()


def main() -> None:
    """Train, tell how it went."""
    task = read_task(__doc__, envs=("cartpole",))
    speaker = Speaker()
    warnings.filterwarnings("ignore")
    torch.manual_seed(task.seed)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    progress = Progress(task)
    with tempfile.TemporaryDirectory() as scratch:
        train(task, progress, scratch)
    speaker.tell(
        task,
        progress,
        peer="PufferLib PPO",
        clock_starts="the first evaluation",
        settings={**DEFAULTS, **task.options, "hidden": HIDDEN},
        packages=("pufferlib", "torch", "gymnasium", "numpy"),
    )


if __name__ == "__main__":
    main()
