"""Mishaps that have spoilt or ended training runs elsewhere, each brought about in a whole run in
one process, or where it strikes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tianflow
import tianflow.server.run.server  # reads files on import, which no loop may
from tests.support import environments
from tests.support.effort import grid
from tests.support.settings import cartpole
from tianflow.algorithms.common.actor_critic import read_batch
from tianflow.algorithms.ppo import PPO, PPOLearner
from tianflow.api import OpenRun
from tianflow.channels.messages import (
    Granted,
    HostFailed,
    PutSettings,
    SaveState,
    StartHost,
    Stop,
)
from tianflow.channels.shm import SharedHostTransport, SharedTransport
from tianflow.components.learner import Learner
from tianflow.config.loading import load_config
from tianflow.config.model import Config, PPOSettings
from tianflow.coordinator import supervisor
from tianflow.core.events import Event
from tianflow.core.layout import make_layout
from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
from tianflow.core.program import HostPlan, HostSpec
from tianflow.core.statistics import DROP_REASONS
from tianflow.errors import RunError
from tianflow.hosts.main import FAILED, LinkedHost
from tianflow.interfaces import LearnerBatch, LiveSettings, MessageLink, StepResult
from tianflow.ledger.ledger import Ledger
from tianflow.ledger.tickets import Blocked
from tianflow.planning import validation
from tianflow.rundir.checkpoints import CheckpointStore, resolve
from tianflow.simulation.rates import MeasuredRates
from tianflow.simulation.simulation import Simulation

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


def updates(handle: OpenRun) -> int:
    return handle.control.statistics().ledger.updates


def endless(**sections: Any) -> Config:
    """A run that nothing but its test ends."""
    return cartpole(
        run={"max_updates": None, **sections.pop("run", {})},
        metrics={"interval_s": 0.05},
        **sections,
    )


# What actors and learner make of the same data
# ------------------------------------------------------------------------


class WatchedSettings(PPOSettings):
    """PPO's own."""

    name: str  # type: ignore[assignment]  # any name that leads to a class of this module


class WatchedLearner(PPOLearner):
    """Compares, before each update, the log-probabilities that actors wrote down with its own."""

    log_ratios: list[float] = []  # noqa: RUF012 - what a learner of this process saw, for its test

    def step(
        self, batch: LearnerBatch, should_stop: Callable[[], bool] = lambda: False
    ) -> StepResult:
        arrays = dict(batch.arrays)
        samples = read_batch(arrays, reward=arrays["reward"], discount=0.9)
        with torch.no_grad():
            output = self.model.evaluate(samples.observation, samples.state, samples.start)
            parameters = self.model.distribution.masked(output.parameters[:-1], samples.mask)
            log_ratio = (
                self.model.distribution.log_prob(parameters, samples.action) - samples.log_prob
            )
        self.log_ratios.append(float(log_ratio[arrays["valid"]].abs().max()))
        return super().step(batch, should_stop)


class WatchedPPO(PPO):
    """The plug-in."""

    settings = WatchedSettings

    @staticmethod
    def make_learner(config: Config, spec: Any, device: torch.device) -> WatchedLearner:
        return WatchedLearner(config, spec, device)


@pytest.mark.parametrize("lstm", [0, 8])
def test_in_a_run_without_staleness_actors_and_learner_agree_on_every_log_probability(
    tmp_path: Path, lstm: int
) -> None:
    """|log ratio| < 1e-5 over a whole run, also where every update moves the policy."""
    WatchedLearner.log_ratios.clear()
    algorithm = {"name": "tests.whole.test_situations:WatchedPPO", "learning_rate": 1e-2}
    config = cartpole(
        algorithm=algorithm,
        network={"lstm": lstm},
        balance={"max_staleness": 0},
        run={"max_updates": 12},
    )
    tianflow.train(config, runs_dir=tmp_path)
    assert 12 == len(WatchedLearner.log_ratios)
    assert max(WatchedLearner.log_ratios) < 1e-5


def test_stale_data_is_told_from_fresh_by_its_log_probabilities(tmp_path: Path) -> None:
    """The measure of the test above does see one version's difference."""
    WatchedLearner.log_ratios.clear()
    algorithm = {"name": "tests.whole.test_situations:WatchedPPO", "learning_rate": 1e-2}
    tianflow.train(
        cartpole(algorithm=algorithm, balance={"max_staleness": 1}, run={"max_updates": 12}),
        runs_dir=tmp_path,
    )
    assert max(WatchedLearner.log_ratios) > 1e-3


# Spaces
# --------------------------------------------------------------------------------------------------

SPACES = [
    "DiscreteStartEnv",
    "MultiDiscreteEnv",
    "MultiBinaryEnv",
    "BoxActionEnv",
    "UnboundedBoxActionEnv",
    "MaskedEnv",
    "MaskedMultiDiscreteEnv",
    "DictEnv",
    "TupleEnv",
]
VECTORS = itertools.cycle(["NextStepVector", "SameStepVector", "DisabledVector"])


@grid(
    environment=list(zip(SPACES, VECTORS, strict=False)),
    learner=[("ppo", 8), ("impala", 0), ("a2c", 8)],
)
def test_every_space_is_trained_in_and_then_played_in(
    tmp_path: Path, environment: tuple[str, str], learner: tuple[str, int]
) -> None:
    """The environments refuse every action outside their space, or that they forbade."""
    (name, vector), (algorithm, lstm) = environment, learner
    config = cartpole(
        env={
            "id": f"tests.support.environments:{vector}",
            "kwargs": {"env": name},
            "normalisation": {"observations": True, "returns": True},
        },
        network={"lstm": lstm},
        evaluation={"episodes": 2},
        run={"max_updates": 2},
    )
    if algorithm != "ppo":
        config = load_config({**config.model_dump(mode="json"), "algorithm": {"name": algorithm}})
    policy = tianflow.train(config, runs_dir=tmp_path).policy
    single = getattr(environments, name)()
    (observation, info), state = single.reset(seed=1), None
    for _ in range(3):
        action, state = policy.act(observation, state, mask=info.get("action_mask"))
        assert single.action_space.contains(action)
        observation, _, terminated, truncated, info = single.step(action)
        if terminated or truncated:
            break


# The knob is what counts
# ----------------------------------------------------------------------------------------------


async def test_every_setting_of_balance_reaches_the_ledger_and_no_constant_stands_above_it(
    tmp_path: Path,
) -> None:
    async with tianflow.open_run(endless(actors={"count": 2}), runs_dir=tmp_path) as handle:
        ledger = handle.run.exchange.ledger
        for bound in (0, 3, 11, 40):
            await handle.balance.set(max_staleness=bound)
            assert bound + 1 == ledger.credits_limit + ledger.publish_lag
        await handle.balance.set(credits=5, straggler_patience=3.5)
        assert (5, 3.5) == (ledger.credits_limit, ledger.limits.patience)
        await handle.algorithm.set(batch_trajectories=3)
        assert 3 == ledger.limits.batch


async def test_what_was_changed_meanwhile_is_in_force_after_a_resume(tmp_path: Path) -> None:
    async with tianflow.open_run(endless(run={"name": "one"}), runs_dir=tmp_path) as handle:
        await until(lambda: updates(handle) > 2)
        await handle.balance.set(max_staleness=7, straggler_patience=3.0)
        await handle.algorithm.set(learning_rate=1e-4)
    config = await asyncio.to_thread(
        lambda: load_config(CheckpointStore.load(resolve("one", tmp_path)).manifest["config"])
    )
    assert (7, 3.0, 1e-4) == (
        config.bound,
        config.balance.straggler_patience,
        config.algorithm.learning_rate,
    )
    async with tianflow.open_run(config, runs_dir=tmp_path, resume="one") as handle:
        await until(lambda: updates(handle) > 2)
        assert 7 == handle.control.statistics().ledger.max_staleness


# Nobody there
# --------------------------------------------------------------------------------------------------


async def test_without_actors_the_learner_stands_still_readiness_says_why_and_it_goes_on_when_they_return(
    tmp_path: Path,
) -> None:
    async with tianflow.open_run(endless(actors={"count": 2}), runs_dir=tmp_path) as handle:
        await until(lambda: updates(handle) > 2)
        await handle.actors.set(count=0)
        await until(lambda: not handle.control.statistics().ledger.in_use)
        assert (False, ("there are no actors: actors.count is 0",)) == handle.run.snapshot.ready()
        stood = updates(handle)
        await asyncio.sleep(0.2)  # that nothing happens meanwhile is what is to be seen
        assert stood == updates(handle)
        await handle.actors.set(count=2)
        await until(lambda: updates(handle) > stood + 2)
        await until(lambda: (True, ()) == handle.run.snapshot.ready())


# Nothing that goes wrong stays unsaid
# ---------------------------------------------------------------------------------


class OnceBrokenLaw:
    """A controller that raises at its 20th look, once, and is well before and after."""

    def __init__(self) -> None:
        self._looks = 0

    def handle(self, event: Event) -> Sequence[object]:
        self._looks += 1
        if self._looks == 20:
            raise ZeroDivisionError("the controller divided by the number of learners")
        return ()


def test_a_controller_that_raises_once_ends_the_run_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match="the controller divided by the number of learners"
    ) as caught:
        tianflow.train(
            endless(balance={"controller": "tests.whole.test_situations:OnceBrokenLaw"}),
            runs_dir=tmp_path,
        )
    assert "ZeroDivisionError" in caught.value.details


async def test_a_background_task_that_raises_ends_the_run_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise LookupError("no such shelf")

    async def whole() -> None:
        async with tianflow.open_run(endless(), runs_dir=tmp_path) as handle:
            await until(lambda: updates(handle) > 2)
            monkeypatch.setattr(CheckpointStore, "publish", broken)
            handle.control.request_checkpoint(source="test")
            await asyncio.wait_for(handle.wait(), 30.0)

    with pytest.raises(RunError, match="no such shelf"):
        await whole()


async def test_a_reporter_that_raises_ends_the_run_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Learner) -> None:
        raise LookupError("no such gauge")

    async def whole() -> None:
        async with tianflow.open_run(endless(), runs_dir=tmp_path) as handle:
            await until(lambda: updates(handle) > 2)
            monkeypatch.setattr(Learner, "statistics", broken)
            await asyncio.wait_for(handle.wait(), 30.0)

    with pytest.raises(RunError, match="no such gauge"):
        await whole()


@asynccontextmanager
async def linked_host() -> AsyncIterator[tuple[LinkedHost, MessageLink, list[object]]]:
    """A host without components, the coordinator's end of its link, and what arrives there."""
    config = await asyncio.to_thread(cartpole)
    spec = (await asyncio.to_thread(validation.require_valid, config)).spec
    assert spec is not None
    layout = make_layout(
        spec, steps=config.actors.rollout_steps, state_spec={}, return_accumulator=False
    )
    transport = SharedTransport(layout=layout, capacity=1)
    plan = HostPlan(HostSpec("actors-0", ()), spec, layout, Version(1, 0))
    settings = PutSettings.of(LiveSettings(config, 1), 0)
    connection = transport.connect()
    heard: list[object] = []
    link = connection.open_link(handle=heard.append, closed=lambda: None, failed=heard.append)
    descriptors = [os.dup(number) for number in connection.descriptors]
    connection.close()
    host = LinkedHost(
        StartHost(plan, settings, transport.address),
        SharedHostTransport.attach(transport.address, descriptors, layout=layout, draws=None),
    )
    yield host, link, heard
    link.close()
    transport.close()


async def test_a_host_that_cannot_do_what_a_message_asks_tells_so_and_leaves() -> None:
    """A loop only logs what a reader raises: a host must not go on as if it had been asked
    nothing.
    """
    async with linked_host() as (host, link, heard):
        link.send(Granted("actor-9", 0, Grant(0, 0, Version(1, 0))))
        assert FAILED == await asyncio.wait_for(host.run(), 10.0)
        await until(lambda: any(isinstance(message, HostFailed) for message in heard))
        [failed] = [message for message in heard if isinstance(message, HostFailed)]
        assert ("actors-0", "KeyError: 'actor-9'") == (failed.component, failed.summary)


async def test_a_request_that_reaches_a_host_while_it_leaves_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its components have ended by then. A checkpoint may be due at that moment."""
    async with linked_host() as (host, link, heard):
        close, request_ended, asked = host._host.close, host._request_ended, asyncio.Event()

        async def slow_close() -> None:
            link.send(SaveState(1, tmp_path))
            await asked.wait()
            await close()

        def ended(task: asyncio.Task[None]) -> None:
            request_ended(task)
            asked.set()

        monkeypatch.setattr(host._host, "close", slow_close)
        monkeypatch.setattr(host, "_request_ended", ended)
        link.send(Stop())
        assert 0 == await asyncio.wait_for(host.run(), 10.0)
        for _ in range(20):  # the reader takes what has arrived
            await asyncio.sleep(0)
        assert [] == [message for message in heard if isinstance(message, HostFailed)]


def test_whatever_a_host_is_killed_for_is_a_known_reason_of_drops() -> None:
    """An increase from nothing is seen by no rate: every reason is shown at 0 from the start."""
    source = Path(supervisor.__file__).read_text()
    reasons = {
        reason
        for reason in ("died", "silent", "start_timeout", "env_hang")
        if f'"{reason}"' in source
    }
    assert 4 == len(reasons)
    assert reasons <= set(DROP_REASONS)


# Clocks, ports
# --------------------------------------------------------------------------------------------------


def test_a_wall_clock_that_jumps_to_and_fro_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: draw.choice([0.0, 1e9, 4e9]))
    config = cartpole(
        actors={"count": 2}, balance={"straggler_patience": 30.0}, run={"max_updates": 10}
    )
    summary = tianflow.train(config, runs_dir=tmp_path).summary
    assert ("done", 10) == (summary["state"], summary["updates"])
    assert set(summary["trajectories"]["dropped"]) <= {"stopped"}
    assert 0 < summary["training_s"] < 60


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


async def test_a_pickle_sent_to_the_port_of_a_run_is_data_and_the_port_is_on_loopback(
    tmp_path: Path,
) -> None:
    (tmp_path / "proof").unlink(missing_ok=True)
    pickle.loads(pickle.dumps(Bomb(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()
    async with tianflow.open_run(endless(), runs_dir=tmp_path / "runs", http=True) as handle:
        await until(lambda: updates(handle) > 2)
        address = json.loads((handle.control.directory / "control.json").read_text())["address"]
        host, port = address.removeprefix("http://").rsplit(":", 1)
        assert "127.0.0.1" == host
        payload = pickle.dumps(Bomb(tmp_path / "marker"))
        for head in (
            b"",
            b"POST /api/v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % len(payload),
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + payload + b"\r\n\r\n")
            await writer.drain()
            assert b" 4" in await asyncio.wait_for(reader.read(13), 10.0)
            writer.close()
        seen = updates(handle)
        await until(lambda: updates(handle) > seen)
    assert not (tmp_path / "marker").exists()


# What the estimate of staleness by Little's controller, and throwing away what is old, come to
# ---------------------------------


class Queue:
    """A ledger whose actors need no time: ``begun`` trajectories are always begun, and wait to be
    trained on in their order.
    """

    def __init__(self, *, batch: int, begun: int) -> None:
        self.ledger = Ledger(
            limits=Limits(batch=batch, max_staleness=None, credits=begun, order="arrival"),
            slots=begun,
        )
        self.ledger.open_lineage(Version(1, 0))
        self._now = itertools.count()

    def update(self) -> list[int]:
        """Updates between beginning and end of training, for each trajectory of one batch."""
        while (grant := self.ledger.grant("actor-0")) is not None:
            self.ledger.begin(grant.ticket, grant.version)
            self.ledger.commit(
                grant.ticket,
                Trajectory(grant.ticket, grant.slot, 1, 1, grant.version),
                float(next(self._now)),
            )
        batch = self.ledger.take(self.ledger.version, 0.0)
        assert isinstance(batch, Batch)
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        after = Version(1, self.ledger.version.number + 1)
        self.ledger.settle(Settlement(after, tickets, None, True, False))
        return [after.number - trajectory.version.number for trajectory in batch.trajectories]


def test_lag_is_what_waits_over_what_an_update_takes() -> None:
    """Handed estimate: 20 workers of 12 environments and 32 steps, 2,048 steps a batch, lag 3.75
    updates from beginning to end.

    Here in parts of 128 steps. Staleness counts versions at use, so the update in which a
    trajectory is used is not in it.
    """
    queue = Queue(batch=2048 // 128, begun=20 * 12 * 32 // 128)
    for _ in range(10):
        queue.update()
    lags = [lag for _ in range(40) for lag in queue.update()]
    assert 3.75 == pytest.approx(sum(lags) / len(lags))
    assert 3 == max(queue.ledger.snapshot().staleness)


def test_who_needs_longer_than_the_bound_is_never_trained_on_by_discarding_and_always_by_pacing() -> (
    None
):
    """Handed values: an update a second, bound 4, trajectories that take 1, 3, 5 and 10 s;
    discarding keeps only 1 and 3.
    """
    durations = {"a": 1, "b": 3, "c": 5, "d": 10}

    def trained(*, paced: bool) -> set[str]:
        """Second by second. Unpaced, an update comes every second whoever is late; paced, the
        learner waits for who stands in its way.
        """
        ledger = Ledger(limits=Limits(batch=1, max_staleness=4, credits=5, patience=None), slots=8)
        ledger.open_lineage(Version(1, 0))
        due: dict[str, tuple[int, Any]] = {}
        version, found = 0, set[str]()
        for now in range(400):
            for holder, seconds in durations.items():
                if holder in due and due[holder][0] <= now:
                    grant = due.pop(holder)[1]
                    ledger.commit(
                        grant.ticket,
                        Trajectory(grant.ticket, grant.slot, 1, 1, grant.version),
                        float(now),
                    )
                if holder not in due and (grant := ledger.grant(holder)) is not None:
                    ledger.begin(grant.ticket, grant.version)
                    due[holder] = (now + seconds, grant)
            taken = ledger.take(Version(1, version), float(now))
            if isinstance(taken, Blocked):
                if not paced:  # somebody else's data, always at hand
                    version += 1
                    ledger.settle(Settlement(Version(1, version), (), 4, True, False))
                continue
            tickets = tuple(trajectory.ticket for trajectory in taken.trajectories)
            holders = {ticket.number: ticket.holder for ticket in ledger.live()}
            found |= {holders[ticket] for ticket in tickets}
            version += 1
            ledger.settle(Settlement(Version(1, version), tickets, 4, True, False))
        return found

    assert {"a", "b"} == trained(paced=False)
    assert set(durations) == trained(paced=True)


@grid(
    controller=["staleness", "freshest", "lockstep"],
    bound=[0, 1, 3],
    times=[(0.2, 10.0), (1.0, 2.0), (3.0, 10.0)],
)
def test_discarding_starves_no_slow_environment(
    controller: str, bound: int, times: tuple[float, float]
) -> None:
    """One actor of eight is slower, in virtual time: as much of its data is kept as of the others',
    and it has at least its share.
    """
    update_s, factor = times
    slow, others = kept_and_trained(controller, bound, factor=factor, update_s=update_s)
    assert slow[0] == pytest.approx(others[0], rel=0.1)
    assert slow[1] >= 0.9 * others[1] / factor


@pytest.mark.parametrize(("bound", "factor"), [(0, 2.0), (1, 2.0), (3, 10.0)])
def test_without_pacing_a_slow_environment_would_starve(bound: int, factor: float) -> None:
    """The measure that the test before goes by does see it."""
    slow, others = kept_and_trained("consume_only", bound, factor=factor, update_s=3.0)
    assert slow[0] < 0.1 * others[0]
    assert slow[1] < 0.1 * others[1] / factor


def kept_and_trained(
    controller: str, bound: int, *, factor: float, update_s: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(trained of all steps that were trained or dropped, steps trained) of the slow actor, and of
    the others in the mean.
    """
    config = cartpole(
        algorithm={"batch_trajectories": 4},
        actors={"count": 8, "rollout_steps": 32},
        balance={"max_staleness": bound, "controller": controller, "min_fragment_steps": 1},
    )
    rates = MeasuredRates(
        trajectory_s=1.0, update_s=update_s, straggler_share=1 / 8, straggler_factor=factor
    )
    simulation = Simulation(config, rates, seed=1)
    simulation.run(updates=60)
    shares = simulation.ledger.snapshot().shares
    found = {
        holder: (
            share.trained_steps / (share.trained_steps + share.dropped_steps),
            share.trained_steps,
        )
        for holder, share in shares.items()
    }
    slow = found.pop("actor-2")  # drawn with that seed
    return slow, (
        statistics.mean(kept for kept, _ in found.values()),
        statistics.mean(steps for _, steps in found.values()),
    )
