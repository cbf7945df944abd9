"""Runs as a user starts them learn: with data of every age that the bound allows, with memory only
where there is memory.
"""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tianflow
from tests.e2e.harness import LiveRun
from tests.support.effort import grid
from tianflow import plugins
from tianflow.algorithms import ppo
from tianflow.algorithms.common import actor_critic, single_pass
from tianflow.algorithms.common.ranks import Ranks
from tianflow.policy import evaluate
from tianflow.rundir.checkpoints import CheckpointStore, resolve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]
PATIENCE_S = 900.0
MEMORY = {
    "env.id": "tianflow.envs.recall:Recall",
    "env.kwargs": {"gap": 10},
    "env.normalisation": {"returns": False},
    "algorithm.learning_rate": 2e-3,
    "algorithm.discount": 0.95,
    "algorithm.entropy_cost": 0.005,
    "algorithm.normalise_advantages": False,
    "network.hidden": [32],
    "network.activation": "tanh",
    "actors.rollout_steps": 8,
    "run.target_return": 0.95,
}
"""What was shown in one fragment must be said in another."""


def train(folder: Path, config: str, **settings: object) -> dict[str, Any]:
    """The summary of a run with ``settings`` (``env__id`` means ``env.id``; ``own`` is a whole
    table of them).
    """
    own: Any = settings.pop("own", {})
    given = {**own, **{key.replace("__", "."): value for key, value in settings.items()}}
    name = f"learning-{uuid.uuid4().hex[:12]}"
    live = LiveRun(
        folder, {"run.name": name, "placement.affinity": "none", **given}, (config,), name
    )
    try:
        assert 0 == live.end(PATIENCE_S), live.output()
        result = live.result
    finally:
        live.process.kill()
        live.process.wait()
        for pid in live.descendants():
            os.kill(pid, signal.SIGKILL)
    assert 0 == result["staleness"]["violations"]
    bound = result["staleness"]["bound"]
    assert bound == "unbounded" or result["staleness"]["max"] <= bound
    return result


def test_the_shipped_config_of_ppo_solves_cartpole(tmp_path: Path) -> None:
    result = train(tmp_path, "cartpole_ppo")
    assert (True, "target_return") == (result["target_reached"], result["reason"])
    assert 475.0 <= result["evaluation"]["mean_return"]
    assert 100 == result["evaluation"]["episodes"]


PART_WAY = {"evaluation.episodes": 20, "evaluation.every_s": 1.0}
"""Who learns nothing makes 9 of CartPole's 500 points, and -1,200 on the pendulum; all the way is
for the benchmark of learning.
"""


@pytest.mark.parametrize(
    ("config", "target"),
    [
        ("cartpole_impala", 150.0),
        ("cartpole_a2c", 150.0),
        ("pendulum_ppo", -500.0),
        ("cartpole_apex", 150.0),
        ("pendulum_sac", -700.0),
    ],
)
def test_the_shipped_config_learns(config: str, target: float, tmp_path: Path) -> None:
    """With replay, two shards hand out what teaches; the pendulum's observations and returns are
    normalised.
    """
    shards = {"replay.shards": 2} if config in {"cartpole_apex", "pendulum_sac"} else {}
    result = train(tmp_path, config, own=PART_WAY | shards, run__target_return=target)
    assert (True, "target_return") == (result["target_reached"], result["reason"])
    assert target <= result["evaluation"]["mean_return"]
    assert bool(shards) == bool(result["trajectories"].get("inserted"))


@pytest.mark.parametrize(
    ("algorithm", "env", "steps", "score"),
    [("a2c", "Acrobot-v1", 90_000, -200.0), ("ppo", "CartPole-v1", 50_000, 150.0)],
)
def test_an_algorithm_and_an_environment_without_a_config_learn(
    algorithm: str, env: str, steps: int, score: float, tmp_path: Path
) -> None:
    """From defaults, and from a preset. Acrobot ends at -500 without learning, CartPole at 9.

    Sampled actions judge what was learned: the most probable ones may never leave the bottom. One
    seed in some does not learn in so few steps, so a second one may.
    """
    found = []
    for seed in (1, 2):
        found.append(_score(algorithm, env, steps, seed, tmp_path))
        if score <= found[-1]:
            break
    assert score <= max(found)


def _score(algorithm: str, env: str, steps: int, seed: int, runs: Path) -> float:
    settings = {
        "run.seed": seed,
        "evaluation.deterministic": False,
        "run.max_env_steps": steps,
        "run.target_return": None,
        "evaluation.episodes": 20,
        "placement.affinity": "none",
    }
    finished = tianflow.train(algorithm, settings, env=env, runs_dir=runs)
    return float(finished.summary["evaluation"]["mean_return"])


@pytest.mark.beside
@pytest.mark.parametrize(("config", "slowdown"), [("cartpole_ppo", 3.0), ("cartpole_impala", 8.0)])
def test_a_slow_learner_makes_data_as_old_as_the_bound_and_they_still_teach(
    config: str, slowdown: float, tmp_path: Path
) -> None:
    """So slow that two actors keep its queue full, even where others take most of the cores."""
    slowed = {"learner.slowdown": slowdown, "actors.count": 2}
    result = train(
        tmp_path, config, own=PART_WAY | slowed, balance__max_staleness=4, run__target_return=100.0
    )
    assert 0.8 * 4 <= result["staleness"]["mean"]
    assert result["target_reached"]


def test_what_was_seen_before_the_fragment_is_remembered_with_an_lstm(tmp_path: Path) -> None:
    result = train(
        tmp_path, "cartpole_impala", own=MEMORY, network__lstm=32, run__max_env_steps=600_000
    )
    assert result["target_reached"]


def test_without_an_lstm_it_is_not(tmp_path: Path) -> None:
    """In twice as many steps as it takes with one."""
    result = train(
        tmp_path, "cartpole_impala", own=MEMORY, network__lstm=0, run__max_env_steps=50_000
    )
    assert not result["target_reached"]
    assert result["evaluation"]["mean_return"] < 0.5


# What a short run proves about its own numbers
# -----------------------------------------------------------------------------

KINDS: dict[str, dict[str, object]] = {
    "discrete": {"env.id": "CartPole-v1"},
    "box, clipped on its way to the environment, all normalised": {
        "env.id": "Pendulum-v1",
        "env.normalisation": {"observations": True, "returns": True},
        "network.kwargs": {"log_std": 1.0},
    },
    "lstm": {
        "env.id": "tianflow.envs.recall:Recall",
        "network.lstm": 16,
        "actors.rollout_steps": 8,
    },
    "masked": {"env.id": "tests.support.environments:MaskedEnv"},
}
SHORT: dict[str, object] = {
    "env.num_envs": 4,
    "placement.launcher": "inline",
    "network.hidden": [16],
    "actors.count": 1,
    "balance.max_staleness": 0,
    "run.target_return": None,
    "evaluation.episodes": 4,
    "run.max_updates": 8,
}


@pytest.mark.parametrize("algorithm", ["ppo", "impala", "a2c"])
@pytest.mark.parametrize("kind", KINDS)
def test_learner_and_actor_agree_on_every_probability_while_the_policy_stands_still(
    kind: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: list[float] = []

    def recording(
        log_ratio: Tensor, v_t: Tensor, target_t: Tensor, valid_t: Tensor, ranks: Ranks
    ) -> dict[str, Tensor]:
        largest.append(float(log_ratio[valid_t].abs().max()))
        return actor_critic.batch_statistics(log_ratio, v_t, target_t, valid_t, ranks)

    monkeypatch.setattr(ppo if algorithm == "ppo" else single_pass, "batch_statistics", recording)
    minibatch = {"algorithm.minibatch_size": 32} if algorithm == "ppo" else {}
    settings = {**SHORT, **minibatch, "algorithm.learning_rate": 0.0, **KINDS[kind]}
    summary = tianflow.train(f"cartpole_{algorithm}", settings, runs_dir=tmp_path).summary
    assert (8, 0) == (summary["updates"], summary["staleness"]["max"])
    assert 8 == len(largest)
    assert max(largest) < 1e-5


DISCOUNT = 0.9
ONE_STATE: dict[str, object] = {
    **SHORT,
    "env.id": "tests.support.environments:OneStateEnv",
    "algorithm.discount": DISCOUNT,
    "algorithm.learning_rate": 3e-3,
    "algorithm.max_grad_norm": 40.0,
    # whole episodes of two steps, whether or not a step is spent on the reset
    "actors.rollout_steps": 12,
    "run.max_updates": 600,
}


VALUES = {"truncate": 1 / (1 - DISCOUNT), "terminate": ((1 + DISCOUNT) + 1) / 2}


@grid(algorithm=["ppo", "impala", "a2c"], ending=list(VALUES))
def test_a_state_whose_episodes_are_cut_off_is_worth_the_endless_sum_and_one_that_ends_the_finite_one(
    algorithm: str, ending: str, tmp_path: Path
) -> None:
    raw = {"env.normalisation.returns": False}
    whole = {"algorithm.gae_lambda": 1.0, "algorithm.minibatch_size": 48, "algorithm.epochs": 8}
    own = {"ppo": {**raw, **whole, "run.max_updates": 200}, "impala": raw, "a2c": raw}
    settings = {**ONE_STATE, **own[algorithm], "env.kwargs": {"length": 2, "ending": ending}}
    finished = tianflow.train(f"cartpole_{algorithm}", settings, runs_dir=tmp_path)
    learner = restored(finished.directory)
    observation = {leaf.name: torch.ones(1, 1, 1) for leaf in finished.policy.spec.observation}
    found = learner.model.evaluate(observation, {}, torch.zeros(1, 1, dtype=torch.bool)).value
    assert VALUES[ending] == pytest.approx(found.item(), rel=0.03)


def restored(directory: Path) -> actor_critic.ActorCriticLearner:
    """The learner of a run's newest checkpoint."""
    checkpoint = CheckpointStore.load(resolve(str(directory), directory.parent))
    policy = tianflow.load_policy(directory)
    learner: actor_critic.ActorCriticLearner = plugins.load(
        "tianflow.algorithms", policy.config.algorithm.name, path="algorithm.name"
    ).make_learner(policy.config, policy.spec, torch.device("cpu"))
    learner.load_state_dict(checkpoint.read())
    return learner


def test_the_normaliser_lies_in_the_checkpoint_and_is_the_one_that_the_run_was_judged_with(
    tmp_path: Path,
) -> None:
    settings = {
        "run.max_updates": 12,
        "run.target_return": None,
        "evaluation.episodes": 32,
        "placement.launcher": "inline",
    }
    finished = tianflow.train("pendulum_ppo", settings, runs_dir=tmp_path)
    judged = finished.summary["evaluation"]
    assert 12 == judged["version"]
    assert judged["mean_return"] == pytest.approx(
        evaluate(finished.policy, episodes=32)["mean_return"], rel=1e-3
    )
    extras = restored(finished.directory).model.buffer.extras
    samples = next(
        value
        for name, value in extras.items()
        if name.startswith("observation/") and name.endswith("/samples")
    )
    assert finished.summary["env_steps"] >= samples.item() > 0
