"""The factory of a host's components: from a plan and the ends of the channels."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from tianflow import plugins
from tianflow.components.actor import Actor
from tianflow.components.learner import Learner
from tianflow.config.schedules import Elapsed, settings_at
from tianflow.core import devices
from tianflow.envs.progress import EnvironmentProgress
from tianflow.errors import PoisonedTrajectoryError, RunError
from tianflow.hosts.compute import Compute
from tianflow.rundir.checkpoints import CheckpointStore

if TYPE_CHECKING:
    import torch

    from tianflow.algorithms.common.ranks import Ranks
    from tianflow.components.batch_trainer import BatchTrainer
    from tianflow.components.evaluator import Evaluator
    from tianflow.components.inference_server import Computing, InferenceServer
    from tianflow.components.learner_rank import LearnerRank
    from tianflow.components.replay_shard import ReplayShard
    from tianflow.components.requesting import RequestSelector
    from tianflow.components.rollout import Rollout
    from tianflow.components.stacking import BatchStacker, DrawStacker
    from tianflow.components.weights import PolicyWeights
    from tianflow.config.model import Config
    from tianflow.core.program import ComponentSpec, HostPlan
    from tianflow.interfaces import (
        Algorithm,
        AlgorithmFactory,
        BatchSource,
        Ends,
        Policy,
        SplitsOverRanks,
    )


AnyComponent: TypeAlias = (
    "Actor | Learner | LearnerRank | Evaluator | ReplayShard | InferenceServer"
)


class Incarnation(NamedTuple):
    """Which life of an actor a rollout belongs to: none shares its seeds with another."""

    lineage: int
    """The lineage of versions that the run continues."""
    host: int
    """How many processes have run its host before."""
    actor: int
    """How many times the actor was built in this process before: actors come and go."""

    @property
    def number(self) -> int:
        """One number of 31 bits, for seeds and streams. Each part repeats after a thousand."""
        return self.lineage % 2**10 << 21 | self.host % 2**11 << 10 | self.actor % 2**10


class Builder:
    """Builds components on request.

    Args:
        plan: what they are built from.
        ends: of their channels.
        compute: the host's compute thread.
    """

    def __init__(self, *, plan: HostPlan, ends: Ends, compute: Compute) -> None:
        self._plan, self._ends, self._compute = plan, ends, compute
        self._host = plan.host.name
        self._acting: tuple[Policy, PolicyWeights] | None = None
        self._built: Counter[str] = Counter()

    @property
    def _config(self) -> Config:
        return self._ends.settings.value.config

    def build(self, component: ComponentSpec) -> AnyComponent:
        """The component that ``component`` describes."""
        makers: dict[str, Callable[[ComponentSpec], AnyComponent]] = {
            "actor": self._actor,
            "learner": self._learner,
            "rank": self._learner_rank,
            "evaluator": self._evaluator,
            "replay": self._replay_shard,
            "inference": self._inference_server,
        }
        return makers[component.role](component)

    def _actor(self, component: ComponentSpec) -> Actor:
        progress = EnvironmentProgress()
        return Actor(
            name=component.name,
            host=self._host,
            sender=self._ends.sender(component.name),
            settings=self._ends.settings,
            events=self._ends.events,
            compute=self._compute,
            make_rollout=lambda: self._rollout(component, progress),
            progress=progress,
        )

    def _learner(self, component: ComponentSpec) -> Learner:
        source = self._ends.source()
        return Learner(
            name=component.name,
            host=self._host,
            source=source,
            settings=self._ends.settings,
            events=self._ends.events,
            compute=self._compute,
            start=(self._plan.start, self._plan.samples),
            trained_s=self._plan.trained_s,
            make_trainer=lambda: self._trainer(component.index, source),
            open_weights=self._ends.weights_writer,
        )

    def _learner_rank(self, component: ComponentSpec) -> LearnerRank:
        from tianflow.components.learner_rank import LearnerRank

        source = self._ends.source()
        return LearnerRank(
            name=component.name,
            host=self._host,
            settings=self._ends.settings,
            compute=self._compute,
            make=lambda: self._trainer(component.index, source),
        )

    def _replay_shard(self, component: ComponentSpec) -> ReplayShard:
        from tianflow.components.replay_shard import ReplayShard
        from tianflow.hosts.shard_factory import restored_shard

        config, spec = self._config, self._plan.spec
        # A shard that was lost starts empty: the run has counted its items as gone.
        checkpoint = self._plan.checkpoint if self._plan.incarnation == 0 else None
        return ReplayShard(
            name=component.name,
            host=self._host,
            end=self._ends.shard_end(component.index),
            settings=self._ends.settings,
            compute=self._compute,
            make_shard=lambda: restored_shard(config, spec, checkpoint, component.index),
            seed=make_seed(config.run.seed, component.index, self._plan.incarnation),
        )

    def _evaluator(self, component: ComponentSpec) -> Evaluator:
        from tianflow.components.evaluator import Evaluator
        from tianflow.envs import make

        previous_step = self._config.previous_step
        return Evaluator(
            name=component.name,
            host=self._host,
            spec=self._plan.spec,
            newest=self._ends.newest_weights,
            settings=self._ends.settings,
            compute=self._compute,
            make_policy=self._policy,
            make_environment=lambda env, count: make.make(env, count, previous_step=previous_step),
        )

    def _inference_server(self, component: ComponentSpec) -> InferenceServer:
        from tianflow.channels.arena import SlotRequests
        from tianflow.components.inference_server import InferenceServer

        servers = self._config.inference.servers
        return InferenceServer(
            name=component.name,
            host=self._host,
            requests=SlotRequests(self._ends.arena, index=component.index, servers=servers),
            steps=self._plan.layout.steps,
            bells=self._ends.bells,
            settings=self._ends.settings,
            compute=self._compute,
            make=self._computing,
        )

    # On the compute thread, where PyTorch is imported
    # -----------------------------------------------------------------

    def _policy(self, device: torch.device | None = None) -> tuple[Policy, PolicyWeights]:
        """The policy on ``device``, by default on the CPU, and its weights."""
        from tianflow.components.weights import PolicyWeights

        self._set_threads()
        make, where = _factory(self._config).make_policy, () if device is None else (device,)
        policy = make(self._config, self._plan.spec, *where)
        nbytes = policy.table.nbytes
        return policy, PolicyWeights(
            reader=self._ends.weights_reader(nbytes), policy=policy, nbytes=nbytes
        )

    def _actors_policy(self) -> tuple[Policy, PolicyWeights]:
        """With central inference, actors use it for noise, which follows the weights, only."""
        from tianflow.algorithms.common.precision import set_acting_precision

        policy, weights = self._policy()
        if not self._config.central:
            set_acting_precision(self._config, policy, "actors")
        return policy, weights

    def _computing(self) -> Computing:
        from tianflow.algorithms.common.precision import set_acting_precision
        from tianflow.components.inference_batch import PolicyBatch
        from tianflow.components.inference_server import Computing

        config, arena = self._config, self._ends.arena
        device = opened(_device(config.inference.device))
        if device.type == "cpu":
            policy, weights = self._policy()
            set_acting_precision(config, policy, "inference")
            return Computing(PolicyBatch(policy, arena), weights.refresh)
        from tianflow.algorithms.common.precision import arithmetic
        from tianflow.components.device_batch import DeviceBatch

        policy, weights = self._policy(device)
        set_acting_precision(config, policy, "inference")
        precision = config.inference.precision
        batch = DeviceBatch(policy, arena, device, lambda: arithmetic(device, precision))
        batch.prepare(min(config.inference.max_batch, max(1, config.actors.count)))
        return Computing(batch, weights.refresh)

    def _rollout(
        self, component: ComponentSpec, progress: EnvironmentProgress | None = None
    ) -> Rollout:
        from tianflow.components.rollout import Rollout

        incarnation = Incarnation(
            self._plan.lineage, self._plan.incarnation, self._built[component.name]
        )
        self._built[component.name] += 1
        # One policy for all actors of the host: each has the compute thread to itself.
        policy, weights = self._acting = self._acting or self._actors_policy()
        rollout = Rollout(
            config=self._config,
            spec=self._plan.spec,
            policy=policy,
            load_weights=weights.refresh,
            component=component.name,
            actor_index=component.index,
            incarnation=incarnation.number,
            actors=lambda: self._config.actors.count,
            attributes=lambda: self._config.env.set,
            progress=progress,
            requests=self._requests(),
        )
        try:
            rollout.prepare()
        except PoisonedTrajectoryError as error:
            raise RunError(component.name, str(error)) from error
        return rollout

    def _requests(self) -> RequestSelector | None:
        from tianflow.components.requesting import RequestSelector

        if not self._config.central:
            return None
        place, servers = self._plan.host.bell, self._config.inference.servers
        assert place is not None
        return RequestSelector(place=place, bells=self._ends.bells[:servers])

    def _trainer(self, rank: int, source: BatchSource) -> BatchTrainer:
        """The trainer of ``rank``, whose algorithm has the state of rank 0."""
        from tianflow.components.batch_trainer import BatchTrainer
        from tianflow.components.staging import make_stager

        self._set_threads()
        device = opened(self._learner_device(rank))
        ranks, algorithm = self._ranks(rank, device), self._algorithm(device)
        if ranks.size > 1:
            ranks.copy_state(algorithm)
            cast("SplitsOverRanks", algorithm).join(ranks)
        draws = self._plan.draws
        items = None if draws is None else ranks.share(draws.num_envs)
        return BatchTrainer(
            algorithm=algorithm,
            make_stacker=lambda count: self._stacker(count, items, device),
            view=source.view,
            ranks=ranks,
            draws=draws is not None,
            stager=make_stager(source.arena, device, items),
        )

    def _ranks(self, rank: int, device: torch.device) -> Ranks:
        from tianflow.algorithms.common import ranks

        size, rendezvous = self._config.learner.ranks, self._plan.rendezvous
        if size == 1:
            return ranks.ALONE
        assert rendezvous is not None
        return ranks.join(rendezvous, rank=rank, size=size, device=device)

    def _learner_device(self, rank: int) -> torch.device:
        """The learner's device; one GPU for each of several ranks."""
        import torch

        name, ranks = self._config.learner.device, self._config.learner.ranks
        if ranks > 1 and name == "auto" and torch.cuda.device_count() < ranks:
            name = "cpu"
        device = _device(name)
        return device if ranks == 1 or device.type == "cpu" else torch.device("cuda", rank)

    def _algorithm(self, device: torch.device) -> Algorithm:
        plan, config = self._plan, self._config
        elapsed = Elapsed(plan.samples, plan.start.number, plan.trained_s)
        # The learner sets the values in force before each update.
        config = config.model_copy(update={"algorithm": settings_at(config, elapsed)})
        algorithm = _factory(config).make_learner(config, self._plan.spec, device)
        if self._plan.checkpoint is not None:
            algorithm.load_state_dict(CheckpointStore.load(self._plan.checkpoint).read())
        return algorithm

    def _stacker(
        self, trajectories: int, items: slice | None, device: torch.device
    ) -> BatchStacker | DrawStacker:
        from tianflow.components.stacking import BatchStacker, DrawStacker

        if self._plan.draws is not None:
            return DrawStacker(layout=self._plan.draws, device=device, items=items)
        return BatchStacker(layout=self._plan.layout, trajectories=trajectories, device=device)

    def _set_threads(self) -> None:
        import torch

        torch.set_num_threads(self._plan.host.threads)


def _device(name: str) -> torch.device:
    """The device that a setting names."""
    import torch

    return torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    )


def opened(device: torch.device) -> torch.device:
    """``device`` by its number, as the one of the calling thread, which sleeps while it waits for
    it.

    PyTorch allocates pinned memory on the thread's own device. A process with another device would
    have a context, and some hundred MiB, on both.
    """
    if device.type == "cpu":
        return device
    import torch

    found = torch.device("cuda", device.index or 0)
    devices.sleep_in_waits(found.index)
    torch.cuda.set_device(found)
    return found


def make_seed(*parts: int) -> int:
    """A seed that no other use of ``parts`` shares."""
    return zlib.crc32(b"replay" + b"".join(part.to_bytes(8, "little") for part in parts))


def _factory(config: Config) -> AlgorithmFactory:
    factory: Any = plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name")
    return factory  # type: ignore[no-any-return]  # a plug-in: held to the contract by mypy only where it is typed
