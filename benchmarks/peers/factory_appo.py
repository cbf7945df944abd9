"""Peer script: Sample Factory's APPO, CartPole-v1 to a target return, Pong for its rate.

``python -m benchmarks.peers.factory_appo cartpole|pong ...``, with an interpreter that has
sample-factory. For Pong, ``epochs=1`` takes one pass over the data with asynchronous workers for
two cores. Without it, the script uses the defaults of Sample Factory's Atari example. The clock
starts with ``run``, when all processes are up. Policy lag is Sample Factory's own, in minibatches.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.common import EPISODES, Lag, Progress, Reporter, Task, read_task

CARTPOLE: dict[str, Any] = {
    "env": "CartPole-v1",
    "use_rnn": False,
    "num_envs_per_worker": 20,
    "policy_workers_per_policy": 2,
    "recurrence": 1,
    "with_vtrace": False,
    "batch_size": 512,
    "reward_scale": 0.1,
    "save_every_sec": 10,
    "experiment_summaries_interval": 10,
}
"""The command that Sample Factory documents for CartPole."""
PONG: dict[str, Any] = {"env": "atari_pong"}
"""Sample Factory's Atari example: 84 x 84 x 4, frame skip 4, Nature CNN."""
ONE_EPOCH: dict[str, Any] = {
    **PONG,
    "async_rl": True,
    "num_workers": 2,
    "num_envs_per_worker": 8,
    "worker_num_splits": 2,
    "rollout": 32,
    "batch_size": 256,
    "num_batches_per_epoch": 4,
    "num_epochs": 1,
}
SAME_NETWORK: dict[str, Any] = {"encoder_mlp_layers": (64, 64), "nonlinearity": "tanh"}
"""Network of the other peers, in place of Sample Factory's 512-512, for CartPole with
``network=64-64``.
"""
FRAME_SKIP = {"cartpole": 1, "pong": 4}
"""Sample Factory counts frames."""


def settings_of(task: Task) -> dict[str, Any]:
    """Return the settings that the task's options choose."""
    if task.env == "cartpole":
        return CARTPOLE | (SAME_NETWORK if task.options.get("network") == "64-64" else {})
    return ONE_EPOCH if task.options.get("epochs") == "1" else PONG


def command_line(settings: Mapping[str, Any]) -> list[str]:
    """Format ``settings`` for Sample Factory's parser. A tuple becomes several arguments without
    the equals sign.
    """
    given: list[str] = []
    for name, value in settings.items():
        given += (
            [f"--{name}", *map(str, value)] if isinstance(value, tuple) else [f"--{name}={value}"]
        )
    return given


def make_pong(
    name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None
) -> Any:
    """Make the example's environment. Each process must register the games and limit OpenCV to one
    thread.
    """
    import ale_py  # noqa: F401 - registers games
    import cv2
    from sf_examples.atari.atari_utils import make_atari_env

    cv2.setNumThreads(1)
    return make_atari_env(name, cfg, env_config, render_mode)


def configuration(task: Task, settings: dict[str, Any], directory: str) -> Any:
    """Return Sample Factory's configuration, parsed by its own command line."""
    common: dict[str, Any] = {
        "algo": "APPO",
        "device": "cpu",
        "seed": task.seed,
        "train_dir": directory,
        "experiment": "peer",
        "stats_avg": EPISODES,
    }
    # the default counts cores that this process may not use
    common["num_workers"] = len(os.sched_getaffinity(0))
    # a fallback for the case that the observer is not called any more
    common["train_for_seconds"] = int(task.seconds) + 30
    given = command_line(common | settings)
    if task.env == "cartpole":
        from sf_examples.train_gym_env import parse_custom_args, register_custom_components

        register_custom_components()
        return parse_custom_args(given)
    from sample_factory.envs.env_utils import register_env
    from sf_examples.atari.train_atari import parse_atari_args, register_atari_components

    register_atari_components()
    register_env("atari_pong", make_pong)
    return parse_atari_args(given)


def observer(task: Task, progress: Progress, lag: Lag) -> Any:
    """Make an observer of every step of training."""
    from sample_factory.algo.runners.runner import AlgoObserver

    class Observer(AlgoObserver):  # type: ignore[misc]  # the lint environment lacks its type hints
        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:  # noqa: ARG002 - the caller passes it by name
            lags = runner.policy_lag[0]
            if "version_diff_avg" in lags:
                lag.add(float(lags["version_diff_avg"]), float(lags["version_diff_max"]))
            returns = (
                runner.policy_avg_stats["reward"][0] if "reward" in runner.policy_avg_stats else ()
            )
            mean = float(sum(returns)) / len(returns) if returns else None
            if progress.observe_mean(
                runner.env_steps.get(0, 0) // FRAME_SKIP[task.env], mean, len(returns)
            ):
                runner._stop_training()  # noqa: SLF001 - an observer has no public way to end a run

    return Observer()


def main() -> None:
    """Train, and report the result."""
    task = read_task(__doc__)
    reporter = Reporter()
    settings = settings_of(task)
    from sample_factory.algo.utils.misc import ExperimentStatus
    from sample_factory.train import make_runner

    lag, progress = Lag("minibatches"), Progress(task)
    with tempfile.TemporaryDirectory() as directory:
        _, runner = make_runner(configuration(task, settings, directory))
        runner.register_observer(observer(task, progress, lag))
        status = runner.init()
        if status == ExperimentStatus.SUCCESS:
            progress.start()
            status = runner.run()
    if status == ExperimentStatus.FAILURE:
        raise SystemExit("Sample Factory reports that the run failed")
    reporter.report(
        task,
        progress,
        peer="Sample Factory APPO",
        clock_starts="run(), its processes being up",
        settings=settings,
        packages=("sample-factory", "torch", "gymnasium", "ale-py", "numpy"),
        lag=lag.summary(),
    )


if __name__ == "__main__":
    main()
