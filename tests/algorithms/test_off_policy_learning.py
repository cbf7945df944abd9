"""Every replay algorithm solves a tiny problem, with a small buffer and no other part of the
system.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tianflow.algorithms.dqn import DQN
from tianflow.algorithms.r2d2 import R2D2
from tianflow.algorithms.sac import SAC
from tianflow.algorithms.td3 import TD3
from tianflow.config.model import Config, EnvSettings, NetworkSettings
from tianflow.config.off_policy import (
    DQNSettings,
    OffPolicySettings,
    R2D2Settings,
    SACSettings,
    TD3Settings,
)
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.interfaces import LearnerBatch

pytestmark = pytest.mark.e2e

torch.set_num_threads(
    1
)  # a second thread slows tensors of this size down, most of all on a busy machine
CPU = torch.device("cpu")
CHOICE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(2,), start=(0,))
FORCE = ActionSpec(kind="box", shape=(1,), dtype="float32", low=(-2.0,), high=(4.0,))


class Windows:
    """The ``latest`` steps, [T, N] per name; draws are uniform over windows that begin every
    ``period`` steps.
    """

    def __init__(self, window: tuple[int, int], latest: int = 1000) -> None:
        self.length, self.period = window
        self.latest = latest
        self.rows: dict[str, list[Any]] = {}

    def add(self, **row: Any) -> None:
        """observation, after, action, reward, terminated, truncated, position (in its episode), and
        state/..., each [N, ...].
        """
        for name, values in row.items():
            self.rows.setdefault(name, []).append(np.array(values))

    def draw(self, n: int, generator: np.random.Generator) -> LearnerBatch:
        stored = {name: np.stack(rows[-self.latest :]) for name, rows in self.rows.items()}
        begins = np.argwhere(stored["position"][: 1 - self.length or None] % self.period == 0)
        t, column = begins[generator.integers(len(begins), size=n)].T
        rows = t + np.arange(self.length)[:, None]
        arrays = {
            name: torch.from_numpy(stored[name][rows, column])
            for name in ("action", "reward", "terminated", "truncated")
        }
        over = (arrays["terminated"] | arrays["truncated"]).int()
        arrays["valid"] = over.cumsum(0) - over == 0
        arrays["obs/"] = torch.from_numpy(
            np.concatenate([stored["observation"][t, column][None], stored["after"][rows, column]])
        )
        arrays["start"] = torch.zeros(self.length + 1, n, dtype=torch.bool)
        arrays["start"][0] = torch.from_numpy(stored["position"][t, column] == 0)
        arrays |= {
            name: torch.from_numpy(leaf[t, column])
            for name, leaf in stored.items()
            if name.startswith("state/")
        }
        return LearnerBatch(
            arrays | {"weight": torch.ones(n), "version": torch.zeros(n, dtype=torch.int64)}
        )


def made(
    factory: Any,
    settings: OffPolicySettings,
    action: ActionSpec,
    size: int,
    columns: int,
    **network: Any,
) -> tuple[Any, Any]:
    """Policy and learner of observations [size]."""
    spec = EnvironmentSpec(
        "Tiny-v0", (LeafSpec("", (size,), "float32"),), action, columns, "next_step"
    )
    networks = NetworkSettings(**{"hidden": (32,), **network})
    config = Config(
        env=EnvSettings(id="Tiny-v0", num_envs=columns), algorithm=settings, network=networks
    )
    policy, learner = factory.make_policy(config, spec), factory.make_learner(config, spec, CPU)
    policy.load(learner.flat())
    return policy, learner


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("double", [False, True])
def test_dqn_finds_the_values_of_a_chain(n: int, double: bool) -> None:
    """Five states, a reward of 1 at the terminal right end, random actions left and right. Q(s,
    right) = 0.9^(3 - s).
    """
    settings = DQNSettings(
        discount=0.9,
        n_step=1,
        learning_rate=1e-2,
        batch_size=64,
        target_update_updates=20,
        double=double,
    )
    settings = settings.model_copy(update={"n_step": n})
    columns, generator = 16, np.random.default_rng(0)
    policy, learner = made(DQN, settings, CHOICE, 5, columns)
    windows, states, position = (
        Windows(settings.window),
        np.eye(5, dtype=np.float32),
        np.zeros(columns, np.int64),
    )
    place = np.zeros(columns, np.int64)
    noise = policy.noise(200, columns, generator)
    for t in range(200):
        action = policy.act({"": torch.from_numpy(states[place])}, {}, noise[t]).action.numpy()
        after = np.clip(place + 2 * action - 1, 0, 4)
        terminated, truncated = after == 4, (position == 9) & (after != 4)
        windows.add(
            observation=states[place],
            after=states[after],
            action=action,
            reward=terminated.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            position=position,
        )
        over = terminated | truncated
        place, position = (
            np.where(over, generator.integers(4, size=columns), after),
            np.where(over, 0, position + 1),
        )
    for _ in range(150):
        learner.step(windows.draw(settings.batch_size, generator))
    policy.load(learner.flat())
    found = policy.act({"": torch.from_numpy(states[:4])}, {}, None)
    assert [1, 1, 1, 1] == found.action.tolist()
    # Three rewards along a random walk are less than three along the best path: n-step returns are
    # not corrected for the policy.
    expected = torch.tensor([0.9**3, 0.9**2, 0.9, 1.0])
    torch.testing.assert_close(
        found.parameters[:, 1], expected, atol=0.05 if n == 1 else 0.35, rtol=0.0
    )


def test_r2d2_remembers_a_cue() -> None:
    """A cue is shown once; four steps later the action must agree with it. The gradient reaches the
    cue, because a window that begins its episode needs no burn-in.
    """
    learning = {
        "discount": 0.9,
        "learning_rate": 1e-2,
        "batch_size": 32,
        "target_update_updates": 20,
        "epsilon_end": 0.3,
    }
    settings = R2D2Settings(burn_in=2, unroll=3, n_step=2, **learning)
    columns, generator = 32, np.random.default_rng(0)
    policy, learner = made(R2D2, settings, CHOICE, 2, columns, lstm=16)
    learner.set_settings(settings, settings.epsilon_updates)
    windows = Windows(settings.window, latest=50)
    scores = []
    for episode in range(30):
        policy.load(learner.flat())
        cue, state, noise = (
            generator.integers(2, size=columns),
            policy.initial_state(columns),
            policy.noise(5, columns, generator),
        )
        shown = [np.eye(2, dtype=np.float32)[cue], *[np.zeros((columns, 2), np.float32)] * 5]
        if episode >= 25:
            noise = [None] * 5
        for t in range(5):
            chosen = policy.act({"": torch.from_numpy(shown[t])}, state, noise[t])
            action = chosen.action.numpy()
            reward = ((action == cue) & (t == 4)).astype(np.float32)
            windows.add(
                observation=shown[t],
                after=shown[t + 1],
                action=action,
                reward=reward,
                terminated=np.full(columns, t == 4),
                truncated=np.zeros(columns, bool),
                position=np.full(columns, t),
                **{f"state/{name}": leaf.numpy() for name, leaf in state.items()},
            )
            state = chosen.state
        scores.append(reward.mean())
        for _ in range(8):
            learner.step(windows.draw(settings.batch_size, generator))
    assert [1.0] * 5 == scores[-5:]
    assert 0.8 > np.mean(scores[:5])


@pytest.mark.parametrize(
    ("factory", "updates", "settings"),
    [
        (
            SAC,
            500,
            SACSettings(learning_rate=1e-2, batch_size=64, initial_temperature=0.2, discount=0.0),
        ),
        (
            TD3,
            700,
            TD3Settings(
                learning_rate=1e-2, batch_size=64, noise_start=0.5, noise_end=0.5, discount=0.0
            ),
        ),
    ],
)
def test_an_actor_learns_the_best_force_for_its_observation(
    factory: Any, updates: int, settings: OffPolicySettings
) -> None:
    """A bandit: the reward decreases with the squared distance from 1 + 2 x; the range of actions
    is not centred at 0.
    """
    columns, generator = 256, np.random.default_rng(0)
    policy, learner = made(factory, settings, FORCE, 1, columns, hidden=(32, 32))
    windows, everywhere = Windows(settings.window), torch.linspace(-0.8, 0.8, 9).unsqueeze(1)
    for _ in range(8):
        x = generator.uniform(-1.0, 1.0, (columns, 1)).astype(np.float32)
        action = policy.act(
            {"": torch.from_numpy(x)}, {}, policy.noise(1, columns, generator)[0]
        ).action.numpy()
        assert (action >= -2.0).all()
        assert (action <= 4.0).all()
        reward, over, first = (
            -((action - 1.0 - 2.0 * x)[:, 0] ** 2),
            np.ones(columns, bool),
            np.zeros(columns, np.int64),
        )
        windows.add(
            observation=x,
            after=x,
            action=action,
            reward=reward,
            terminated=over,
            truncated=~over,
            position=first,
        )
    for _ in range(0, updates, 50):
        for _ in range(50):
            learner.step(windows.draw(settings.batch_size, generator))
        policy.load(learner.flat())
        best = policy.act({"": everywhere}, {}, None).action
        off = (best - (1.0 + 2.0 * everywhere)).abs().max().item()
        if off < 0.4:
            return
    pytest.fail(f"it is off by {off:.2f}")
