"""Replay where people and programs look: metrics, status, screen, summary, the verdict; by hand,
and in a real run.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import tianflow.api  # at once: a lazy import inside a coroutine would block its loop
from tests.support.fakes_run import FakeReplay, FakeRun
from tests.support.paths import ROOT
from tianflow.cli.screen import drawing, plain_line, summary_text
from tianflow.config import loading as config_loading
from tianflow.config.model import Config
from tianflow.core.jsonable import json_ready
from tianflow.core.statistics import DISCARD_REASONS, RunStatistics
from tianflow.observability.prometheus.families import FAMILIES
from tianflow.observability.prometheus.prometheus import Exporter
from tianflow.observability.rates import RunRates
from tianflow.observability.run_document import RunDocument, describe
from tianflow.rundir.summary import summarise

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")

APEX = ROOT / "configs" / "cartpole_apex.toml"
REPLAY_FAMILIES = [family for family in FAMILIES if family.name.startswith("replay")]
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(read: Callable[[], RunStatistics]) -> Series:
    """Series by name and labels, without prefix and run."""
    text, _ = Exporter(runs=lambda: [read()], requests={}).exposition("")
    samples = [
        sample
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    ]
    return {
        (
            s.name.removeprefix("tianflow_"),
            tuple(sorted((key, v) for key, v in s.labels.items() if key != "run")),
        ): s.value
        for s in samples
    }


def total(series: Series, name: str) -> float:
    """Over all labels; KeyError if there is no such series."""
    found = [value for (other, _), value in series.items() if other == name]
    if not found:
        raise KeyError(name)
    return sum(found)


def totals(series: Series, *names: str) -> float:
    return sum(total(series, name) for name in names)


def assert_accounts_close(series: Series) -> None:
    """Nothing is lost between the ledger, replay and the learner."""
    ends = (
        "trajectories_trained_total",
        "trajectories_inserted_total",
        "trajectories_dropped_total",
        "trajectories_open",
    )
    assert total(series, "trajectories_begun_total") == totals(series, *ends)
    draws = ("replay_items_trained_total", "replay_items_discarded_total", "replay_items_held")
    assert total(series, "replay_items_drawn_total") == totals(series, *draws)
    resident = sum(
        value for (name, _), value in series.items() if name == "replay_items"
    )  # of shards that are up; there may be none
    assert total(series, "replay_items_inserted_total") == resident + total(
        series, "replay_items_removed_total"
    )


def document(run: FakeRun, rates: RunRates | None = None) -> RunDocument:
    rates = RunRates(read=run.statistics) if rates is None else rates
    return describe(rates.sample(), run.config, rates)


def described(run: FakeRun, rates: RunRates | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json_ready(document(run, rates))
    return found


def shown(run: FakeRun, rates: RunRates | None = None) -> dict[str, str]:
    """Rows of the live screen by their names."""
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    console.print(drawing(document(run, rates)))
    assert isinstance(console.file, io.StringIO)
    return {line.split(" ", 1)[0]: line for line in console.file.getvalue().splitlines()}


@pytest.fixture
def run() -> FakeRun:
    return FakeRun(replay=True)


@pytest.fixture
def replay(run: FakeRun) -> FakeReplay:
    assert run.replay is not None
    return run.replay


# Metrics
# --------------------------------------------------------------------------------------------------


def test_every_family_of_replay_has_series_in_a_run_with_replay_and_none_in_another(
    run: FakeRun,
) -> None:
    ends = {"counter": "_total", "gauge": "", "histogram": "_count"}
    names = {family.name + ends[family.kind] for family in REPLAY_FAMILIES}
    assert {
        "replay_items",
        "replay_samples_per_insert",
        "replay_limiter_blocked_seconds_total",
    } <= names
    assert set() == names - {name for name, _ in scrape(run.statistics)}
    assert [] == [name for name, _ in scrape(FakeRun().statistics) if name.startswith("replay")]


def test_what_went_into_replay_is_accounted_for_at_every_look(
    run: FakeRun, replay: FakeReplay
) -> None:
    run.insert(replay)
    assert 0.0 == total(scrape(run.statistics), "replay_items_held")
    replay.draw(64)
    replay.insert(40, shard=1)
    assert_accounts_close(scrape(run.statistics))
    replay.discard(24, "learner_lost")
    series = scrape(run.statistics)
    assert_accounts_close(series)
    assert 40.0 == total(series, "replay_items_held")
    assert (32.0, 24.0) == tuple(
        series["replay_items_discarded_total", (("reason", reason),)]
        for reason in ("expired", "learner_lost")
    )
    assert 1.0 == total(series, "trajectories_inserted_total")


def test_series_of_a_lost_shard_go_and_it_is_not_up(run: FakeRun, replay: FakeReplay) -> None:
    replay.insert(30, shard=0)
    replay.insert(50, shard=1)
    before = scrape(run.statistics)
    assert [30.0, 50.0] == [before["replay_items", (("shard", str(index)),)] for index in (0, 1)]
    assert [15.0, 25.0] == [before["replay_mass", (("shard", str(index)),)] for index in (0, 1)]
    replay.lose(1)
    after = scrape(run.statistics)
    assert ("replay_items", (("shard", "1"),)) not in after
    assert [1.0, 0.0] == [after["replay_shard_up", (("shard", str(index)),)] for index in (0, 1)]
    assert 1.0 == total(after, "replay_shards")
    assert_accounts_close(after)


def test_reasons_to_discard_are_there_before_the_first_one(run: FakeRun) -> None:
    series = scrape(run.statistics)
    assert [0.0] * len(DISCARD_REASONS) == [
        series["replay_items_discarded_total", (("reason", reason),)] for reason in DISCARD_REASONS
    ]


def test_the_band_is_shown_and_without_one_there_is_no_target(
    run: FakeRun, replay: FakeReplay
) -> None:
    names = (
        "replay_samples_per_insert_target",
        "replay_limiter_min_diff",
        "replay_limiter_max_diff",
    )
    assert [2.0, -72.0, 328.0] == [total(scrape(run.statistics), name) for name in names]
    limits = replay.limiter.limits
    unlimited = type(limits)(1.0, limits.min_size, -float("inf"), float("inf"), limits.capacity)
    replay.limiter.change(unlimited)
    series = scrape(run.statistics)
    assert (names[0], ()) not in series
    assert [-float("inf"), float("inf")] == [total(series, name) for name in names[1:]]
    assert None is described(run)["replay"]["samples_per_insert_target"]
    json.dumps(described(run), allow_nan=False)


# Status, screen, summary
# ----------------------------------------------------------------------------------------------


def test_the_status_says_what_is_in_replay(run: FakeRun, replay: FakeReplay) -> None:
    assert None is described(FakeRun())["replay"]
    run.insert(replay)
    replay.insert(68, shard=1)
    status = described(run)
    assert 1 == status["trajectories"]["inserted"]
    expected: dict[str, Any] = {
        "shards": 2,
        "items": 100,
        "steps": 100,
        "memory_bytes": 8192,
        "capacity": 1000,
        "fill": 0.1,
        "min_size": 64,
    }
    expected |= {
        "inserted": 100,
        "removed": 0,
        "drawn": 64,
        "trained": 32,
        "discarded": {"expired": 32},
        "held": 0,
    }
    expected |= {"samples_per_insert": 0.64, "samples_per_insert_target": 2.0}
    expected |= {
        "limiter": {"diff": 136.0, "min_diff": -72.0, "max_diff": 328.0},
        "blocked_s": {"insert": 0.0, "draw": 100.0},
    }
    assert expected == {key: status["replay"][key] for key in expected}


def test_the_ratio_is_the_one_of_lately_once_there_is_one(run: FakeRun, replay: FakeReplay) -> None:
    rates = RunRates(read=run.statistics)
    replay.insert(300)
    assert 0.0 == described(run, rates)["replay"]["samples_per_insert"]
    run.now += 10.0
    replay.insert(100)
    replay.draw(200)
    assert 2.0 == described(run, rates)["replay"]["samples_per_insert"]


def test_shares_held_back_are_of_the_last_seconds_only(run: FakeRun, replay: FakeReplay) -> None:
    rates = RunRates(read=run.statistics)
    replay.share = 0.5
    assert {} == described(run, rates)["replay"]["held_back"]
    run.now += 10.0
    assert {"insert": 0.0, "draw": 0.5} == described(run, rates)["replay"]["held_back"]


def test_the_screen_says_how_full_replay_is_and_whom_it_holds_back(
    run: FakeRun, replay: FakeReplay
) -> None:
    rates = RunRates(read=run.statistics)
    replay.insert(60)
    assert (
        "60 of 1,000 items (draws begin at 64)  0 samples per insert of 2  nothing blocked"
        in shown(run, rates)["replay"]
    )
    run.now += 5.0
    run.insert(replay)
    assert (
        "92 of 1,000 items  2 samples per insert of 2  learner blocked 100%"
        in shown(run, rates)["replay"]
    )
    replay.held_back = "insert"
    assert "learner blocked" not in plain_line(document(run, rates))
    replay.lose(0)
    replay.lose(1)
    assert "shards do not work" in shown(run)["replay"]
    run.state = "done"
    assert "replay 0.6957 samples per insert of 2  " in plain_line(document(run))


def test_time_of_shards_is_not_taken_for_what_is_in_replay(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    described(run, rates)
    run.now += 5.0
    rows = shown(run, rates)
    assert "waiting:request 100%" in rows["shards"]
    assert "of 1,000 items" in rows["replay"]


def test_a_run_without_replay_has_no_line_about_it() -> None:
    assert "replay" not in shown(FakeRun())
    assert "replay" not in plain_line(document(FakeRun()))


def summary_of(run: FakeRun) -> str:
    summary = summarise(
        run.statistics(), reason="", target_reached=False, training_s=1.0, seed=1, error=None
    )
    return summary_text(json.loads(json.dumps(summary, allow_nan=False)))


def test_the_summary_says_inserted_where_there_is_replay_and_trained_where_there_is_none(
    run: FakeRun, replay: FakeReplay
) -> None:
    run.insert(replay)
    text = summary_of(run)
    assert "trajectories: 1 begun, 1 inserted, dropped: none" in text
    assert (
        "replay: 32 items inserted, 64 drawn, 2 samples per insert of 2, blocked: actors 0:00, "
        "learner 1:40" in text
    )
    other = FakeRun()
    other.train(1)
    assert "trajectories: 2 begun, 2 trained, dropped: none" in summary_of(other)
    assert "replay" not in summary_of(other)


# A real run
# --------------------------------------------------------------------------------------------------


def apex(**sections: dict[str, object]) -> Config:
    """The config as it lies on disk, in one process, with a short evaluation."""
    short: dict[str, dict[str, object]] = {
        "placement": {"launcher": "inline"},
        "evaluation": {"episodes": 1, "num_envs": 1},
        "run": {"target_return": 1000.0},
    }
    changes = {
        f"{name}.{key}": value
        for name in {*short, *sections}
        for key, value in {**short.get(name, {}), **sections.get(name, {})}.items()
    }
    return config_loading.load_config(APEX, changes)


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.05)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "config",
    [
        apex(
            actors={"count": shards}, replay={"shards": shards, "capacity": 1_100, "min_size": 250}
        )
        for shards in (1, 2)
    ],
    ids=("1 shard", "2 shards"),
)
async def test_the_accounts_of_a_real_run_close_at_every_scrape(
    tmp_path: Path, config: Config
) -> None:
    async with tianflow.open_run(config, runs_dir=tmp_path) as handle:
        scrapes: list[Series] = []

        def enough() -> bool:
            scrapes.append(scrape(handle.control.statistics))
            return (
                total(scrapes[-1], "replay_items_trained_total") > 3_000
                and total(scrapes[-1], "replay_items_removed_total") > 0
            )

        await until(enough)
        for series in scrapes:
            assert_accounts_close(series)
        assert any(total(series, "replay_items_held") > 0 for series in scrapes)
        assert config.replay.shards == total(scrapes[-1], "replay_shards")
        counters = [
            name
            for family in REPLAY_FAMILIES
            if family.kind == "counter"
            for name in [f"{family.name}_total"]
        ]
        for name in counters:
            seen = [
                total(series, name)
                for series in scrapes
                if any(name == other for other, _ in series)
            ]
            assert sorted(seen) == seen, f"{name} went down"
        assert 0.0 == total(scrapes[-1], "staleness_violations_total")
        assert total(scrapes[-1], "replay_items_trained_total") == total(
            scrapes[-1], "staleness_updates_count"
        )
        diff, low, high = (
            total(scrapes[-1], f"replay_limiter_{name}")
            for name in ("diff", "min_diff", "max_diff")
        )
        assert low <= diff <= high


@pytest.mark.e2e
def test_a_resumed_run_accounts_for_its_own_draws(tmp_path: Path) -> None:
    """The limiter goes on counting where the checkpoint stood; what was drawn then was trained on
    then.
    """
    config = apex(run={"max_updates": 20, "name": "one"})
    first = tianflow.train(config, runs_dir=tmp_path)
    more = tianflow.train(
        apex(run={"max_updates": 30, "name": "one"}), runs_dir=tmp_path, resume="one"
    )
    for summary in (first.summary, more.summary):
        replay = summary["replay"]
        assert (
            replay["drawn"]
            == replay["trained"] + sum(replay["discarded"].values()) + replay["held"]
        )
        trajectories = summary["trajectories"]
        assert (
            trajectories["begun"]
            == trajectories["inserted"]
            + sum(trajectories["dropped"].values())
            + trajectories["open"]
        )
    trained = [made.summary["replay"]["trained"] for made in (first, more)]
    assert [20 * config.algorithm.items, 10 * config.algorithm.items] == trained
    assert more.summary["replay"]["inserted"] > first.summary["replay"]["inserted"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (apex(learner={"slowdown": 50.0}), "learning-bound"),
        (apex(replay={"samples_per_insert": 0.02}), "sampling-bound"),
    ],
    ids=("slow learner", "few samples per insert"),
)
async def test_whom_the_limiter_of_a_real_run_holds_back_is_the_verdict(
    tmp_path: Path, config: Config, expected: str
) -> None:
    async with tianflow.open_run(config, runs_dir=tmp_path) as handle:
        await until(lambda: handle.control.statistics().diagnosis.verdict == expected)
