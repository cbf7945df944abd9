"""Peer script: TorchRL's ``AsyncBatchedCollector`` with an inference server in its own process,
Pong for its rate.

TorchRL publishes no settings for Pong with this collector, so it gets the fast configuration of the
collector's documentation: one process for each environment, messages of 64 steps. The job is that
of ``benchmarks/configs/pong_impala.toml``: 84 x 84 x 4, frame skip 4, Nature CNN, one pass over
each step. Options:

- ``learner=none``: collect without learning
- ``envs=N``: number of processes of environments
- ``vector=N``: each of these processes steps N games with ALE's vector environment
- ``edges=A,B,...``: edges of the histogram of requests, in seconds

``python -m benchmarks.peers.torchrl_served pong ...``, with an interpreter that has torchrl. The
clock starts with the first batch, which is not counted. Processor time and requests are counted
from the end of the warm-up to the end.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.peers.common import Lag, Progress, Reporter, Task, read_task, tree_seconds

if TYPE_CHECKING:
    from benchmarks.peers.torchrl_timed import TimedTransport

SETTINGS: dict[str, Any] = {
    "n_envs": 8,
    "frames_per_batch": 512,
    "chunk": 64,
    "vector": 0,
    "gae_lambda": 1.0,
    "gamma": 0.99,
    "entropy": 0.01,
    "value": 0.5,
    "max_norm": 0.5,
    "clip": 0.1,
    "learning_rate": 6e-4,
    "server_timeout": 0.001,
}
"""A batch is one minibatch and is used once. With ``vector`` a message is a whole batch."""
ACTIONS = 6


def make_environment(seed: int, vector: int) -> Any:
    """Make one environment: Pong with the usual wrappers, or ``vector`` games that step at once."""
    import ale_py
    import cv2
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
    from torchrl.envs import Compose, GymWrapper, RewardSum, TransformedEnv

    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    if vector:
        from ale_py.vector_env import AtariVectorEnv

        games = AtariVectorEnv(
            *("pong", vector),
            num_threads=1,
            repeat_action_probability=0.0,
            autoreset_mode="SameStep",
        )
        wrapped = GymWrapper(games, categorical_action_encoding=True)
        made = TransformedEnv(wrapped, Compose(RewardSum()))
        made.set_seed(seed)
        return made
    gymnasium.register_envs(ale_py)
    game = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    stacked = FrameStackObservation(AtariPreprocessing(game), 4)
    made = TransformedEnv(
        GymWrapper(stacked, categorical_action_encoding=True), Compose(RewardSum())
    )
    made.set_seed(seed)
    return made


class Nature(nn.Module):
    """The Nature CNN, from bytes [..., 4, 84, 84]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return features [..., 512]."""
        lead = observation.shape[:-3]
        found: torch.Tensor = self.layers(observation.reshape(-1, 4, 84, 84).float() / 255.0)
        return found.reshape(*lead, 512)


def make_model() -> tuple[Any, Any, Any]:
    """Return the actor, the critic, and the actor with a value, which share the network."""
    from tensordict.nn import TensorDictModule
    from torch.distributions import Categorical
    from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator

    common = TensorDictModule(Nature(), ["observation"], ["features"])
    head = TensorDictModule(nn.Linear(512, ACTIONS), ["features"], ["logits"])
    actor = ProbabilisticActor(
        head, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    both = ActorValueOperator(common, actor, ValueOperator(nn.Linear(512, 1), ["features"]))
    return both.get_policy_operator(), both.get_value_operator(), both


def make_policy() -> Any:
    """Make the server's policy, which answers with nothing but what the learner needs. It runs in
    the server's process.
    """
    torch.set_num_threads(1)
    return make_model()[0].select_out_keys("action", "action_log_prob")


def make_transport(count: int, vector: int, edges: Sequence[float]) -> TimedTransport:
    """Make the slots of requests and answers, with the layouts of one environment and one answer of
    the policy.
    """
    from benchmarks.peers.torchrl_timed import TimedTransport

    environment = make_environment(0, vector)
    request = environment.fake_tensordict().select("observation")
    environment.close()
    with torch.no_grad():
        answer = make_policy()(request.clone().unsqueeze(0)).squeeze(0)
    response = answer.select("action", "action_log_prob")
    response["policy_version"] = torch.zeros(request.batch_size, dtype=torch.long)
    return TimedTransport(request, response, count=count, edges=edges)


def make_collector(seed: int, transport: TimedTransport, settings: Mapping[str, Any]) -> Any:
    """Make a collector whose environments reach the server's process directly.

    Raises:
        RuntimeError: the collector serves the policy in another way.
    """
    from torchrl.collectors import AsyncBatchedCollector
    from torchrl.modules.inference_server import InferenceServerConfig

    count, vector = settings["n_envs"], settings["vector"]
    seeds = (1000 * seed + index for index in range(count))
    made = AsyncBatchedCollector(
        [functools.partial(make_environment, one, vector) for one in seeds],
        policy_factory=make_policy,
        frames_per_batch=SETTINGS["frames_per_batch"],
        env_backend="multiprocessing",
        transport=transport,
        transition_chunk_size=settings["chunk"],
        server_config=InferenceServerConfig(
            max_batch_size=count, min_batch_size=1, timeout=SETTINGS["server_timeout"]
        ),
    )
    if made.server_backend != "process":
        made.shutdown()
        raise RuntimeError(f"the policy is served from a {made.server_backend}, not from a process")
    return made


class Learner:
    """One gradient step of PPO for each batch."""

    def __init__(self) -> None:
        from torchrl.objectives import ClipPPOLoss
        from torchrl.objectives.value import GAE

        self.policy, critic, _ = make_model()
        self._objective = ClipPPOLoss(
            self.policy,
            critic,
            clip_epsilon=SETTINGS["clip"],
            entropy_coeff=SETTINGS["entropy"],
            critic_coeff=SETTINGS["value"],
            normalize_advantage=True,
        )
        self._advantage = GAE(
            gamma=SETTINGS["gamma"],
            lmbda=SETTINGS["gae_lambda"],
            value_network=critic,
            shifted=True,  # values of steps and next steps with one call
            time_dim=-1,
        )
        self._optimiser = torch.optim.Adam(
            self._objective.parameters(), lr=SETTINGS["learning_rate"], eps=1e-5
        )

    def step(self, batch: Any) -> None:
        """Update with ``batch``: chunks of consecutive steps, or steps of a vector environment."""
        chunks = batch.reshape(-1, SETTINGS["chunk"]) if batch.ndim == 1 else batch.transpose(0, 1)
        with torch.no_grad():
            self._advantage(chunks)
        losses = self._objective(chunks.reshape(-1))
        self._optimiser.zero_grad()
        sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
        nn.utils.clip_grad_norm_(self._objective.parameters(), SETTINGS["max_norm"])
        self._optimiser.step()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals at one moment: processor time of all processes, batches of the server, and requests up
    to each edge.
    """

    at: float
    cpu_s: float
    batches: int
    counts: list[int]


def snapshot(transport: TimedTransport) -> Snapshot:
    """Read the totals."""
    batches, counts = transport.read()
    return Snapshot(time.perf_counter(), tree_seconds(), batches, counts)


def window(first: Snapshot, last: Snapshot, edges: Sequence[float]) -> dict[str, Any]:
    """Return what happened between two snapshots."""
    return {
        "seconds": last.at - first.at,
        "cpu_s": last.cpu_s - first.cpu_s,
        "batches": last.batches - first.batches,
        "edges": list(edges),
        "counts": [many - few for many, few in zip(last.counts, first.counts, strict=True)],
    }


def settings_of(task: Task) -> dict[str, Any]:
    """Return the settings that the options of ``task`` choose."""
    changed = {"n_envs": int(task.options.get("envs", SETTINGS["n_envs"]))}
    vector = int(task.options.get("vector", SETTINGS["vector"]))
    if vector:
        changed |= {"vector": vector, "chunk": SETTINGS["frames_per_batch"] // vector}
    return SETTINGS | changed


def train(
    task: Task, progress: Progress, settings: Mapping[str, Any], edges: Sequence[float]
) -> dict[str, Any]:
    """Collect, and train unless ``learner=none``, until ``progress`` ends it. Return more fields of
    the answer.
    """
    learner = None if task.options.get("learner") == "none" else Learner()
    transport = make_transport(settings["n_envs"], settings["vector"], edges)
    collector = make_collector(task.seed, transport, settings)
    first: Snapshot | None = None
    lag = Lag("updates")
    try:
        if learner is not None:
            collector.update_policy_weights_(learner.policy)
        steps = 0
        for number, batch in enumerate(collector):
            if number == 0:  # processes start while it is collected
                progress.start()
                continue
            steps += batch.numel()
            over = batch["next", "done"].squeeze(-1)
            returns = batch["next", "episode_reward"].squeeze(-1)[over].tolist()
            ended = progress.observe(steps, returns)
            if first is None and progress.is_warm:
                first = snapshot(transport)
            if ended:
                break
            if learner is not None:
                behind = (collector.policy_version - batch["policy_version"]).float()
                lag.add(behind.mean().item(), behind.max().item())
                learner.step(batch)
                collector.update_policy_weights_(learner.policy)
        assert first is not None
        return {"window": window(first, snapshot(transport), edges), "lag": lag.summary()}
    finally:
        collector.shutdown()


def main() -> None:
    """Train, and report the result."""
    task = read_task(__doc__, envs=("pong",))
    reporter = Reporter()
    warnings.filterwarnings("ignore")
    torch.manual_seed(task.seed)
    torch.set_num_threads(1)
    progress = Progress(task)
    settings = settings_of(task)
    edges = [float(edge) for edge in task.options.get("edges", "").split(",") if edge]
    reporter.report(
        task,
        progress,
        peer="TorchRL AsyncBatchedCollector",
        clock_starts="the first batch, when all processes work",
        settings=settings,
        packages=("torchrl", "tensordict", "torch", "gymnasium", "ale-py", "numpy"),
        **train(task, progress, settings, edges),
    )


if __name__ == "__main__":
    main()
