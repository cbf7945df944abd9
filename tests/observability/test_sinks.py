"""Sinks get a run's history, and nothing that they do, or fail to do, reaches the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tianflow.api  # at once: a lazy import inside a coroutine would block its loop
from tests.support.fakes_run import FakeRun
from tests.support.settings import cartpole
from tianflow.config.loading import load_config
from tianflow.config.model import MetricsSettings
from tianflow.core.statistics import SinkStatistics
from tianflow.errors import ConfigError
from tianflow.interfaces import SinkRun
from tianflow.observability.recorder import recorded
from tianflow.observability.sinks import outlet as outlets
from tianflow.observability.sinks.base import Point, flat, points
from tianflow.observability.sinks.outlet import SinkFeeder, require_sinks
from tianflow.observability.sinks.tensorboard import TensorBoard
from tianflow.rundir.history import NAME, read_rows

IMPORTED = tianflow.api
Row = dict[str, Any]


class Kept:
    """Stores its rows, for a test in one process."""

    made: list[Kept]

    def __init__(self, *, run: SinkRun, size: int = 1) -> None:
        self.run, self.size, self.rows, self.closed, self.thread = (
            run,
            size,
            [],
            False,
            threading.current_thread().name,
        )
        self.rows: list[Row]
        Kept.made.append(self)

    def write(self, row: Row) -> None:
        assert not self.closed
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


class Stuck(Kept):
    """Does not come back from its first row until the test lets it."""

    freed: threading.Event
    entered: threading.Event

    def write(self, row: Row) -> None:
        Stuck.entered.set()
        assert Stuck.freed.wait(50.0)
        super().write(row)


class Broken(Kept):
    """Takes two rows."""

    def write(self, row: Row) -> None:
        if len(self.rows) == 2:
            raise ConnectionError("the server is gone")
        super().write(row)

    def close(self) -> None:
        super().close()
        raise ConnectionError("still gone")


class Unmade(Kept):
    def __init__(self, *, run: SinkRun) -> None:
        raise PermissionError("no key")


class Needy(Kept):
    packages = ("no_such_package_at_all",)
    extra = "needy"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    Kept.made, Stuck.freed, Stuck.entered = [], threading.Event(), threading.Event()
    yield
    Stuck.freed.set()


def row(t: float, **fields: Any) -> Row:
    return {"t": t, "time": 1000.0 + t, "env_steps": int(100 * t), "marks": [], **fields}


def name_of(sink: type) -> str:
    return f"tests.observability.test_sinks:{sink.__name__}"


def outlet(sink: type[Kept], *, capacity: int = 300) -> SinkFeeder:
    return SinkFeeder(name="it", make=lambda: sink(run=SinkRun("r", Path(), {})), capacity=capacity)


def told(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning, with all that is known of it."""
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return str(record.__dict__)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not true():  # noqa: ASYNC110 - a thread has no notification
            await asyncio.sleep(0.005)


# An outlet
# --------------------------------------------------------------------------------------------------


async def test_a_sink_gets_every_row_in_order_and_is_closed_in_a_thread_of_its_own() -> None:
    it = outlet(Kept)
    for t in range(50):
        it.offer(row(t))
    await it.close(30.0)
    (sink,) = Kept.made
    assert (list(range(50)), True, "sink-it") == (
        [one["t"] for one in sink.rows],
        sink.closed,
        sink.thread,
    )
    assert SinkStatistics(50, 0) == it.statistics()


async def test_what_a_slow_sink_has_no_room_for_is_dropped_and_counted_and_the_oldest_are_kept() -> (
    None
):
    it = outlet(Stuck, capacity=3)
    it.offer(row(0))
    await until(Stuck.entered.is_set)
    for t in range(1, 10):
        it.offer(row(t))
    assert SinkStatistics(10, 7) == it.statistics()
    Stuck.freed.set()
    await it.close(30.0)
    assert [0, 1, 2] == [one["t"] for one in Kept.made[0].rows]
    assert SinkStatistics(10, 7) == it.statistics()


async def test_a_sink_that_never_comes_back_is_given_up_and_what_it_did_not_take_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = outlet(Stuck)
    for t in range(4):
        it.offer(row(t))
    async with asyncio.timeout(30.0):
        await it.close(0.05)
    it.offer(row(4))
    assert SinkStatistics(5, 5) == it.statistics()
    assert "a sink did not close in time" in caplog.text


async def test_a_sink_that_raises_is_told_of_once_closed_and_gets_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = outlet(Broken)
    for t in range(5):
        it.offer(row(t))
    await until(lambda: it.statistics().dropped == 3)
    for t in range(5, 8):
        it.offer(row(t))
    await it.close(30.0)
    (sink,) = Kept.made
    assert ([0, 1], True) == ([one["t"] for one in sink.rows], sink.closed)
    assert SinkStatistics(8, 6) == it.statistics()
    assert "the server is gone" in told(caplog)


async def test_a_sink_that_cannot_be_made_costs_rows_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = outlet(Unmade)
    await until(it._stopped.is_set)
    it.offer(row(0))
    await it.close(30.0)
    assert SinkStatistics(1, 1) == it.statistics()
    assert "no key" in told(caplog)


def test_an_outlet_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="every row would be dropped"):
        outlet(Kept, capacity=0)


# What rows become
# --------------------------------------------------------------------------------------------------


def test_learning_comes_first_under_known_names_and_evaluations_at_their_own_time() -> None:
    mark = {"t": 3.0, "kind": "evaluation", "version": 7, "mean_return": 90.0, "episodes": 4}
    mark |= {"success": 0.5, "mine/lap": 2.0}
    large = {"t": 3.25, "kind": "evaluation", "name": "large", "version": 7, "mean_return": 9.0}
    large |= {"success": 0.25}
    found = points(
        row(
            4.0,
            span_s=1.0,
            generation=2,
            state="running",
            mean_return=float("nan"),
            mean_length=12.0,
            learning={
                "train/policy_loss": {"count": 3, "mean": -0.5},
                "rollout/success": {"count": 2, "mean": 0.75},
                "train/odd": {"count": 1, "mean": None},
            },
            updates=8,
            episodes=5,
            steps_per_s=50.0,
            updates_per_s=2.0,
            staleness={"mean": 0.5, "p99": 1, "bound": None},
            credits={"limit": 4},
            dropped={"expired": 1},
            replay={"items": 7},
            shares={"learner": {"busy": 0.25}},
            unknown_field=1,
            marks=[mark, large, {"t": 3.5, "kind": "change"}],
        )
    )
    assert [
        Point(
            400,
            1003.0,
            {
                "eval/version": 7.0,
                "eval/mean_reward": 90.0,
                "eval/episodes": 4.0,
                "eval/success": 0.5,
                "eval/mine/lap": 2.0,
            },
        ),
        Point(
            400,
            1003.25,
            {
                "eval/large/version": 7.0,
                "eval/large/mean_return": 9.0,
                "eval/large/success": 0.25,
            },
        ),
        Point(
            400,
            1004.0,
            {
                "train/policy_loss": -0.5,
                "rollout/success": 0.75,
                "rollout/ep_len_mean": 12.0,
                "rollout/episodes": 5.0,
                "train/n_updates": 8.0,
                "time/total_timesteps": 400.0,
                "time/fps": 50.0,
                "time/updates_per_s": 2.0,
                "balance/staleness/mean": 0.5,
                "balance/staleness/p99": 1.0,
                "balance/credits/limit": 4.0,
                "balance/dropped/expired": 1.0,
                "replay/items": 7.0,
                "system/shares/learner/busy": 0.25,
                "system/unknown_field": 1.0,
            },
        ),
    ] == found


def test_rows_of_older_versions_have_no_learning() -> None:
    (point,) = points(row(4.0, mean_return=3.0))
    assert {"rollout/ep_rew_mean": 3.0, "time/total_timesteps": 400.0} == point.values


def test_a_statistic_cannot_replace_a_number_of_the_run() -> None:
    mine = {"rollout/ep_rew_mean": {"count": 1, "mean": 99.0}}
    (point,) = points(row(4.0, mean_return=3.0, learning=mine))
    assert 3.0 == point.values["rollout/ep_rew_mean"]


def test_tables_are_flattened_to_dotted_paths() -> None:
    assert {"a.b": 1, "a.c": {}, "d": [2]} == flat({"a": {"b": 1, "c": {}}, "d": [2]})


# Settings
# --------------------------------------------------------------------------------------------------


def config(*sinks: str, **kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"sinks": list(sinks), "kwargs": kwargs}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            config("tensorbord"),
            (
                "metrics.sinks = 'tensorbord': is not an installed name; accepted: one of mlflow, tensorboard, "
                "wandb"
            ),
        ),
        (config("tensorboard", "tensorboard"), "tensorboard is named twice"),
        (
            config("tensorboard", wandb={}),
            "metrics.kwargs.wandb: is not the name of a sink in metrics.sinks",
        ),
    ],
)
def test_settings_that_name_no_sink_are_refused(metrics: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cartpole(metrics=metrics)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            config(name_of(Needy)),
            "no_such_package_at_all is not installed; accepted: pip install 'sinks[needy]' first",
        ),
        (
            config(name_of(Kept), **{name_of(Kept): {"sise": 2}}),
            "is not an argument of the sink; accepted: one of size; did you mean 'size'?",
        ),
        (config("tests.observability.test_sinks:IMPORTED"), "is not callable"),
    ],
)
def test_a_sink_that_could_not_be_made_is_known_before_anything_starts(
    tmp_path: Path, metrics: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "packages_distributions", lambda: {"tests": ["sinks"]})
    with pytest.raises(ConfigError, match="metrics") as caught:
        tianflow.train(cartpole(metrics=metrics), runs_dir=tmp_path)
    assert said in str(caught.value)
    assert [] == list(tmp_path.iterdir())


def test_a_missing_package_of_a_shipped_sink_names_the_extra_of_tianflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorBoard, "packages", ("no_such_package_at_all",))
    with pytest.raises(
        ConfigError, match=r"accepted: pip install -c .* -e \"\.\[tensorboard\]\" first$"
    ):
        require_sinks(cartpole(metrics=config("tensorboard")))


def test_a_missing_package_of_a_sink_in_a_file_names_no_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlets, "packages_distributions", dict)
    with pytest.raises(ConfigError, match="no_such_package_at_all is not installed$"):
        require_sinks(cartpole(metrics=config(name_of(Needy))))


def test_installed_sinks_say_what_they_need() -> None:
    from tianflow import plugins

    for name in plugins.names(outlets.GROUP):
        factory: Any = plugins.load(outlets.GROUP, name, path="metrics.sinks")
        assert ((name,), name) == (factory.packages, factory.extra)


# Runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> FakeRun:
    """Made before there is a loop: it reads the installed entry points."""
    return FakeRun(directory=tmp_path)


def feed(fake: FakeRun, *sinks: type) -> None:
    metrics = MetricsSettings(sinks=tuple(map(name_of, sinks)))
    fake.config = fake.config.model_copy(update={"metrics": metrics})
    require_sinks(fake.config)  # as before every run


async def test_sinks_that_block_or_raise_neither_slow_the_recorder_nor_keep_a_run_from_ending(
    fake: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "FLUSH_S", 0.05)
    feed(fake, Stuck, Unmade, Kept)
    async with asyncio.timeout(30.0):
        async with recorded(fake):
            await until(lambda: (tmp_path / NAME).exists() and fake.sinks[name_of(Kept)].rows == 1)
            fake.now += 5.0
    kept = next(sink for sink in Kept.made if type(sink) is Kept)
    assert 2 == len(kept.rows)
    assert {
        name_of(Stuck): SinkStatistics(2, 2),
        name_of(Unmade): SinkStatistics(2, 2),
        name_of(Kept): SinkStatistics(2, 0),
    } == fake.sinks


@pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
def test_a_sink_gets_the_rows_of_the_history_the_config_and_the_evaluation(tmp_path: Path) -> None:
    finished = tianflow.train(
        cartpole(
            run={"name": "one"}, metrics=config(name_of(Kept), **{name_of(Kept): {"size": 3}})
        ),
        runs_dir=tmp_path,
    )
    (sink,) = Kept.made
    assert read_rows(finished.directory / NAME) == json.loads(json.dumps(sink.rows))
    assert (3, True, "one", finished.directory) == (
        sink.size,
        sink.closed,
        sink.run.id,
        sink.run.directory,
    )
    assert "CartPole-v1" == sink.run.config["env"]["id"]
    found = [
        point.values
        for one in sink.rows
        for point in points(one)
        if "eval/mean_reward" in point.values
    ]
    assert [finished.summary["evaluation"]["mean_return"]] == [
        values["eval/mean_reward"] for values in found
    ]


# The real ones
# --------------------------------------------------------------------------------------------------


def fed(folder: Path, make: Callable[[SinkRun], Any]) -> list[Row]:
    """Two rows through a sink, with an evaluation in the second."""
    run = SinkRun("a-run", folder, load_config("cartpole_ppo").model_dump(mode="json"))
    rows = [
        row(
            1.0,
            mean_return=20.0,
            learning={"train/policy_loss": {"count": 2, "mean": -0.25}},
            staleness={"p99": 1},
            shares={"learner": {"waiting:batch": 0.5}},
        ),
        row(
            2.0,
            mean_return=30.0,
            learning={"train/policy_loss": {"count": 4, "mean": -0.125}},
            staleness={"p99": 2},
            marks=[{"t": 1.5, "kind": "evaluation", "mean_return": 99.0, "version": 3}],
        ),
    ]
    sink = make(run)
    for one in rows:
        sink.write(one)
    sink.close()
    return rows


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra tensorboard is not installed",
    )
    from tianflow.observability.sinks.tensorboard import TensorBoard

    fed(tmp_path, lambda run: TensorBoard(run=run))
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    names = {
        "rollout/ep_rew_mean",
        "train/policy_loss",
        "time/total_timesteps",
        "balance/staleness/p99",
        "system/shares/learner/waiting:batch",
        "eval/mean_reward",
        "eval/version",
    }
    assert names == set(found.Tags()["scalars"])
    assert [(100, 20.0, 1001.0), (200, 30.0, 1002.0)] == [
        (e.step, e.value, e.wall_time) for e in found.Scalars("rollout/ep_rew_mean")
    ]
    assert [(100, -0.25), (200, -0.125)] == [
        (e.step, e.value) for e in found.Scalars("train/policy_loss")
    ]
    assert [(200, 99.0, 1001.5)] == [
        (e.step, e.value, e.wall_time) for e in found.Scalars("eval/mean_reward")
    ]
    (text,) = found.Tensors("config/text_summary")
    assert '"id": "CartPole-v1"' in text.tensor_proto.string_val[0].decode()


@pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
def test_a_run_leaves_files_for_tensorboard_in_its_directory(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra tensorboard is not installed",
    )
    finished = tianflow.train(cartpole(metrics=config("tensorboard")), runs_dir=tmp_path)
    found = accumulator.EventAccumulator(str(finished.directory / "tensorboard"))
    found.Reload()
    assert finished.summary["env_steps"] == found.Scalars("train/n_updates")[-1].step
    assert 4.0 == found.Scalars("train/n_updates")[-1].value
    for name in ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "learning_rate"):
        assert found.Scalars(f"train/{name}"), name
    assert found.Scalars("rollout/ep_len_mean")[-1].value > 1.0
    assert (
        pytest.approx(finished.summary["evaluation"]["mean_return"])
        == found.Scalars("eval/mean_reward")[-1].value
    )


@pytest.mark.extra("mlflow")
@pytest.mark.timeout(180)  # its store is made table by table
@pytest.mark.filterwarnings("ignore")  # its own, of the libraries under it
def test_mlflow_finds_what_was_written_and_a_resumed_run_goes_on_in_its_own(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    from tianflow.observability.sinks.mlflow import MLflow

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):
        fed(tmp_path, lambda run: MLflow(run=run, tracking_uri=uri))
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("tianflow").experiment_id])
    assert ("a-run", "FINISHED", "CartPole-v1") == (
        found.info.run_name,
        found.info.status,
        found.data.params["env.id"],
    )
    history = client.get_metric_history(found.info.run_id, "rollout/ep_rew_mean")
    assert {(100, 20.0, 1001000), (200, 30.0, 1002000)} == {
        (metric.step, metric.value, metric.timestamp) for metric in history
    }
    assert (99.0, 0.5, -0.125) == (
        found.data.metrics["eval/mean_reward"],
        found.data.metrics["system/shares/learner/waiting.batch"],
        found.data.metrics["train/policy_loss"],
    )


@pytest.mark.extra("wandb")
@pytest.mark.timeout(180)  # it starts a process of its own
@pytest.mark.filterwarnings("ignore")  # its own, of the libraries under it
async def test_wandb_keeps_a_run_that_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tianflow.observability.sinks.wandb import WandB

    monkeypatch.setenv("WANDB_SILENT", "true")
    await asyncio.to_thread(fed, tmp_path, lambda run: WandB(run=run, mode="offline"))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-a-run.wandb")
    wanted = (
        b"rollout/ep_rew_mean",
        b"train/policy_loss",
        b"balance/staleness/p99",
        b"system/shares/learner/waiting:batch",
        b"eval/mean_reward",
        b"CartPole-v1",
    )

    def missing() -> list[bytes]:
        data = file.read_bytes()
        return [each for each in wanted if each not in data]

    # Some versions of W&B end a run before their process has written its file.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30.0):
            while await asyncio.to_thread(missing):  # noqa: ASYNC110 - a file has no notification
                await asyncio.sleep(0.05)
    assert [] == await asyncio.to_thread(missing)


@pytest.mark.parametrize(("sink", "argument"), sorted(outlets.DIRECTORIES.items()))
def test_a_relative_directory_is_that_of_the_start_of_the_run(
    sink: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {argument: "boards", "other": "boards"}
    assert {argument: str(tmp_path / "boards"), "other": "boards"} == outlets._with_absolute(
        sink, given
    )
    assert {"path": "boards"} == outlets._with_absolute("my:Sink", {"path": "boards"})
