from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.effort import examples
from tests.support.settings import cartpole
from tests.support.virtual_time import broken_identity
from tianflow.cli import main as cli
from tianflow.config.model import Config
from tianflow.core.directives import Directive, SetBound, SetCredits
from tianflow.core.events import Event, Observed
from tianflow.core.payloads import Batch
from tianflow.errors import ConfigError
from tianflow.simulation import measuring
from tianflow.simulation.clock import Clock
from tianflow.simulation.outcome import SimulationResult
from tianflow.simulation.rates import MeasuredRates, make_rates, read_rates
from tianflow.simulation.simulation import Simulation


def config(
    *,
    count: int = 4,
    batch: int = 4,
    bound: int | str = 1,
    steps: int = 32,
    **sections: dict[str, Any],
) -> Config:
    return cartpole(
        algorithm={"batch_trajectories": batch},
        actors={"count": count, "rollout_steps": steps, **sections.pop("actors", {})},
        balance={"max_staleness": bound, "min_fragment_steps": 1, **sections.pop("balance", {})},
        **sections,
    )


def rates(**values: float) -> MeasuredRates:
    return MeasuredRates(
        **{"trajectory_s": 1.0, "update_s": 1.0, "trajectory_spread": 0.1, **values}
    )


def equal_halves(actors: int, batch: int, bound: int, **values: float) -> SimulationResult:
    """An update takes as long as the actors take for a batch."""
    given = rates(update_s=batch / actors, **values)
    return Simulation(config(count=actors, batch=batch, bound=bound), given, seed=1).run(
        updates=200, warmup=20
    )


# Closed forms
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actors", "bound"), [(8, 0), (16, 0), (8, 2), (16, 1), (32, 1), (32, 2), (64, 3)]
)
def test_the_bound_costs_what_the_formula_says(actors: int, bound: int) -> None:
    batch = 8
    share = equal_halves(actors, batch, bound, trajectory_spread=0.01).trained_steps_per_s / (
        actors * 32 * 4
    )
    expected = min(1.0, (bound + 1) * batch / (actors + batch))
    assert expected * 0.95 <= share <= expected * 1.02


def test_a_slow_learner_sets_the_pace_and_trains_at_the_bound() -> None:
    outcome = Simulation(config(count=8, batch=4, bound=3), rates(update_s=4.0)).run(
        updates=50, warmup=10
    )
    assert 0.25 == pytest.approx(outcome.updates_per_s, rel=0.01)
    assert 3.0 == pytest.approx(outcome.staleness.mean, abs=0.05)
    assert "learning-bound" == outcome.bottleneck
    assert 1.0 == pytest.approx(outcome.learner["busy"], abs=0.01)


def test_slow_actors_set_the_pace() -> None:
    outcome = Simulation(config(count=4, batch=4, bound=4), rates(update_s=0.01)).run(
        updates=50, warmup=10
    )
    assert 4 * 128 == pytest.approx(outcome.steps_per_s, rel=0.03)
    assert "sampling-bound" == outcome.bottleneck
    assert sum(outcome.shares_of_actors.values()) == pytest.approx(1.0)
    assert sum(outcome.learner.values()) == pytest.approx(1.0)


def test_actors_of_one_host_take_turns() -> None:
    alone, shared = (
        Simulation(config(bound=4, actors={"hosts": hosts}), rates(update_s=0.01)).run(
            updates=50, warmup=10
        )
        for hosts in (None, 2)
    )
    assert alone.steps_per_s / 2 == pytest.approx(shared.steps_per_s, rel=0.03)


def test_a_slow_link_costs_time_and_staleness() -> None:
    near, far = (
        Simulation(config(bound=1), rates(update_s=1.0, latency_s=delay)).run(
            updates=100, warmup=10
        )
        for delay in (0.0, 0.5)
    )
    assert far.steps_per_s < 0.75 * near.steps_per_s
    narrow = rates(update_s=0.1, trajectory_spread=0.0, bandwidth=1000.0, weights_bytes=2000.0)
    outcome = Simulation(config(count=4, batch=4, bound=0), narrow).run(updates=50, warmup=10)
    assert 1 / (1.0 + 0.1 + 2.0) == pytest.approx(
        outcome.updates_per_s, rel=0.02
    )  # rolled out, trained on, two seconds of weights
    assert outcome.shares_of_actors["waiting:weights"] == pytest.approx(2.0 / 3.1, abs=0.02)


# Controllers and ledger
# --------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_outcome_and_another_does_not() -> None:
    hard = rates(
        straggler_share=0.25, straggler_factor=5.0, failures_per_hour=60.0, update_spread=0.3
    )
    first, again, other = (
        Simulation(config(count=16), hard, seed=seed).run(updates=100).document()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_stragglers_are_cut_and_keep_their_share() -> None:
    slow = rates(update_s=0.5, straggler_share=0.125, straggler_factor=10.0)
    simulation = Simulation(config(count=8, batch=4, bound=1), slow, seed=3)
    outcome = simulation.run(updates=300)
    assert outcome.cuts > 0
    assert "straggler" not in outcome.dropped
    steps = sorted(share.trained_steps for share in simulation.ledger.snapshot().shares.values())
    assert 0.04 < steps[0] / steps[-1] < 0.2  # naturally a tenth


def test_failures_lose_trajectories_in_progress_and_actors_restart() -> None:
    simulation = Simulation(
        config(count=8, batch=4, bound=1), rates(failures_per_hour=360.0, restart_s=5.0), seed=2
    )
    outcome = simulation.run(updates=300)
    assert outcome.dropped["died"] > 0
    assert 5 / 15 == pytest.approx(
        outcome.shares_of_actors["down"], abs=0.05
    )  # fails every 10 s, is down for 5
    assert not broken_identity(simulation.ledger)


def test_other_controllers_run_as_they_are() -> None:
    eager, fresh, strict, loose = (
        Simulation(
            config(count=4, batch=4, bound=8, balance={"controller": controller}),
            rates(update_s=2.0),
        ).run(updates=400, warmup=200)
        for controller in ("staleness", "freshest", "lockstep", "open_loop")
    )
    assert fresh.staleness.mean is not None
    assert eager.staleness.mean is not None
    assert fresh.staleness.mean < eager.staleness.mean / 2
    assert fresh.updates_per_s > 0.9 * eager.updates_per_s
    assert 0 == strict.staleness.max
    assert loose.staleness.bound is None


class Judged(Simulation):
    """Records the staleness of all that an update used, by the versions of learner and actors."""

    def _use(self, batch: Batch) -> None:
        super()._use(batch)
        if self._updating is batch:
            self.used = getattr(self, "used", [])
            self.used.append(
                (
                    self._bound,
                    max(self._version.number - t.version.number for t in batch.trajectories),
                )
            )


class Tightening:
    """A controller that lowers the bound from 3 to 0 in the middle of an update, when a prefetched
    batch is staler.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        late = isinstance(event, Observed) and event.now > 20.0
        return (SetBound(0 if late else 3), SetCredits(16))


def test_a_prefetched_batch_that_a_lower_bound_excludes_is_not_used() -> None:
    given = config(bound=3, balance={"controller": "tests.simulation.test_simulation:Tightening"})
    simulation = Judged(given, rates(update_s=2.0))
    returned, give_back = [], simulation.exchange.give_back

    def record(tickets: Iterable[int]) -> None:
        returned.append(tickets)
        give_back(tickets)

    simulation.exchange.give_back = record  # type: ignore[method-assign]
    outcome = simulation.run(updates=40)
    assert 1 == len(returned)
    assert {3, 0} == {bound for bound, _ in simulation.used}
    assert all(staleness <= bound for bound, staleness in simulation.used)
    assert (40, 0) == (outcome.updates, outcome.staleness.violations)
    assert outcome.dropped["expired"] >= 4


SMALL = st.fixed_dictionaries(
    {
        "count": st.integers(1, 12),
        "batch": st.integers(1, 5),
        "bound": st.integers(0, 4),
        "interval": st.integers(1, 4),
        "patience": st.sampled_from([0.0, 0.5, 10.0]),
        "minimum": st.integers(1, 8),
        "hosts": st.none() | st.integers(1, 3),
    }
)
HARD = st.builds(
    MeasuredRates,
    trajectory_s=st.sampled_from([0.2, 1.0]),
    update_s=st.sampled_from([0.01, 0.3, 2.0]),
    trajectory_spread=st.sampled_from([0.0, 0.1, 1.0]),
    straggler_share=st.sampled_from([0.0, 0.3]),
    straggler_factor=st.sampled_from([3.0, 30.0]),
    failures_per_hour=st.sampled_from([0.0, 400.0]),
    restart_s=st.sampled_from([0.0, 2.0]),
    latency_s=st.sampled_from([0.0, 0.05, 0.7]),
    learner_latency_s=st.sampled_from([0.0, 0.02, 0.5]),
    bandwidth=st.just(1000.0),
    trajectory_bytes=st.sampled_from([0.0, 500.0]),
    weights_bytes=st.sampled_from([0.0, 500.0]),
)


def small(case: dict[str, Any]) -> Config:
    return config(
        count=case["count"],
        batch=case["batch"],
        bound=case["bound"],
        steps=8,
        actors={"hosts": case["hosts"]},
        weights={"publish_interval_updates": case["interval"]},
        balance={"straggler_patience": case["patience"], "min_fragment_steps": case["minimum"]},
    )


@examples(15)
@example(
    case={
        "count": 2,
        "batch": 1,
        "bound": 0,
        "interval": 1,
        "patience": 0.0,
        "minimum": 1,
        "hosts": 1,
    },
    hard=MeasuredRates(
        trajectory_s=0.2,
        update_s=0.01,
        trajectory_spread=0.0,
        failures_per_hour=400.0,
        restart_s=0.0,
        bandwidth=1000.0,
        weights_bytes=500.0,
    ),
    seed=1,
)  # one fails while it waits for weights, and the other one of its host has the turn when they come
@given(case=SMALL, hard=HARD, seed=st.integers(0, 5))
def test_the_bound_holds_and_updates_continue_in_every_case(
    case: dict[str, Any], hard: MeasuredRates, seed: int
) -> None:
    simulation = Judged(small(case), hard, seed=seed)
    outcome = simulation.run(updates=25, seconds=3e4)
    assert 25 == outcome.updates
    stalest = max(staleness for _, staleness in simulation.used)
    assert stalest <= case["bound"]
    assert 0 == outcome.staleness.violations
    assert outcome.staleness.max is not None
    assert outcome.staleness.max <= stalest
    assert not broken_identity(simulation.ledger)


def test_a_run_that_cannot_continue_is_reported_as_stalled() -> None:
    simulation = Simulation(config(), rates())
    simulation.ledger.hold_grants(True)
    outcome = simulation.run(updates=10)
    assert ("stalled", 0) == (outcome.bottleneck, outcome.updates)


@pytest.mark.parametrize("env_steps", [0.25, 2.4, 7.6])
def test_each_trajectory_has_a_whole_number_of_steps_whose_mean_is_the_rate(
    env_steps: float,
) -> None:
    outcome = Simulation(config(bound=4, steps=8), rates(update_s=0.01, env_steps=env_steps)).run(
        updates=500, warmup=10
    )
    assert max(1.0, env_steps) == pytest.approx(
        outcome.trained_steps_per_s / (4 * outcome.updates_per_s), rel=0.01
    )


def test_the_way_to_the_compute_thread_costs_time_only_if_no_grant_waits_there() -> None:
    plain = rates(update_s=0.5, turn_s=0.25, trajectory_spread=0.0)
    alone = Simulation(config(count=1, batch=1, bound=0), plain).run(updates=50, warmup=10)
    assert 1 / (0.25 + 1.0 + 0.5) == pytest.approx(alone.updates_per_s, rel=0.01)
    ahead = Simulation(config(count=1, batch=1, bound=8), plain).run(updates=50, warmup=10)
    assert 1.0 == pytest.approx(ahead.updates_per_s, rel=0.01)


@pytest.mark.e2e
def test_ten_thousand_actors_with_stragglers_and_failures_are_kept_within_the_bound() -> None:
    """More than a run may have. A trajectory takes a few events, however many others exist."""
    hard = rates(
        update_s=0.05,
        trajectory_spread=0.3,
        straggler_share=0.02,
        straggler_factor=20.0,
        failures_per_hour=60.0,
    )
    simulation = Judged(config(batch=500, bound=10), hard, actors=10_000, seed=1)
    outcome = simulation.run(updates=25)
    assert (10_000, 25, 0) == (outcome.actors, outcome.updates, outcome.staleness.violations)
    assert 10 == max(staleness for _, staleness in simulation.used)
    assert outcome.cuts > 0
    assert {"died"} <= set(outcome.dropped) <= {"died", "straggler"}
    assert not broken_identity(simulation.ledger)
    assert outcome.events < 8 * simulation.ledger.snapshot().granted


# MeasuredRates and the command
# --------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["simulate", *arguments])


def test_the_command_takes_rates_from_a_file_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "rates.toml").write_text("trajectory_s = 1.0\nupdate_s = 5.0\n")
    (tmp_path / "rates.json").write_text('{"rates": {"trajectory_s": 1.0, "update_s": 5.0}}')
    assert read_rates(tmp_path / "rates.toml") == read_rates(tmp_path / "rates.json")
    result = run(
        "cartpole_ppo",
        "actors.count=3",
        "rates.update_s=0.5",
        "--rates",
        str(tmp_path / "rates.toml"),
        "--updates",
        "20",
        "--json",
    )
    assert 0 == result.exit_code, result.output
    document = json.loads(result.stdout)
    assert (3, 20, 0.5, 1.0) == (
        document["actors"],
        document["updates"],
        document["rates"]["update_s"],
        document["rates"]["trajectory_s"],
    )
    many = run(
        "cartpole_ppo",
        "actors=5000",
        "rates.trajectory_s=1",
        "rates.update_s=1",
        "--updates",
        "2",
        "--json",
    )
    assert 5000 == json.loads(many.stdout)["actors"]
    plain = run("cartpole_ppo", "rates.trajectory_s=1", "rates.update_s=1", "--updates", "20")
    assert "staleness: min" in plain.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pendulum_sac", "rates.trajectory_s=1", "rates.update_s=1"), "learns from replay"),
        (("cartpole_ppo", "rates.trajectory_s=1"), "rates.update_s: is missing"),
        (
            ("cartpole_ppo", "rates.trajectory_s=1", "rates.update_s=1", "rates.speed=1"),
            "is not a rate",
        ),
        (("cartpole_ppo", "rates.trajectory_s=-1", "rates.update_s=1"), "rates.trajectory_s = -1"),
        (("cartpole_ppo", "--rates", "."), "use --like for a run"),
        (
            ("cartpole_ppo", "actors=0", "rates.trajectory_s=1", "rates.update_s=1"),
            "a whole number from 1",
        ),
        (
            ("cartpole_ppo", "actors=many", "rates.trajectory_s=1", "rates.update_s=1"),
            "is not a valid number of actors",
        ),
        (("cartpole_ppo", "--rates", "no-such-file.toml"), "No such file"),
        (
            ("cartpole_ppo", "actors.count=0", "rates.trajectory_s=1", "rates.update_s=1"),
            "without actors no trajectory is sampled",
        ),
    ],
)
def test_an_impossible_simulation_is_refused_with_a_sentence(
    arguments: tuple[str, ...], words: str
) -> None:
    result = run(*arguments)
    assert 2 == result.exit_code
    assert words in result.stderr


def test_a_rate_that_is_not_a_number_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rates\.update_s"):
        make_rates({"trajectory_s": 1.0, "update_s": "fast"})


def test_rates_are_measured_from_the_config_itself() -> None:
    measured = make_rates(measuring.measure(cartpole(), seconds=0.05))
    assert 0 < measured.trajectory_s < 5
    assert 0 < measured.update_s < 5
    assert 0.5 * 64 < (measured.env_steps or 0) <= 64
    assert measured.weights_bytes > 0


# Time
# --------------------------------------------------------------------------------------------------


@examples(50)
@given(delays=st.lists(st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0]), max_size=4), max_size=8))
def test_events_happen_in_order_of_time_and_of_scheduling(delays: list[list[float]]) -> None:
    """Each of the first events schedules more when it happens."""
    clock, asked, happened, happened_at = Clock(), [], [], []
    clock.expect(2.0)

    def ask(delay: float, then: list[float]) -> None:
        asked.append((clock.now + delay, len(asked)))
        clock.at(delay, happen, asked[-1], then)

    def happen(due: tuple[float, int], then: list[float]) -> None:
        assert due[0] == clock.now
        happened.append(due)
        clock.interrupt()
        for delay in then:
            ask(delay, [])

    for then in delays:
        ask(sum(then) % 3.0, then)
    assert min((due for due, _ in asked), default=None) == clock.next
    for until in (0.5, 1.0, 2.5, math.inf):
        while clock.advance(until):
            happened_at.append(clock.now)
        assert [due for due in sorted(asked) if due[0] <= until] == happened
    assert [due for due, _ in sorted(asked)][: len(happened_at)] == happened_at
    assert clock.next is None
