"""`train`, `open_run` and `load_policy`, with everything in one process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

import tianflow.api  # at once: a lazy import inside a coroutine would block its loop
from tests.support.settings import cartpole
from tianflow.cli import train
from tianflow.config.loading import load_config, read_revision
from tianflow.errors import CheckpointError, ConfigError, RunError, StateConflictError

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")

ENDLESS = cartpole(run={"max_updates": None})
NARROW = cartpole(run={"max_updates": None}, balance={"memory_limit": 100_000})


def run(tmp_path, *, resume=None, **sections):
    return tianflow.train(cartpole(**sections), runs_dir=tmp_path, resume=resume)


def test_a_run_ends_where_it_was_told_to_and_says_what_came_of_it(tmp_path):
    finished = run(tmp_path)
    summary = finished.summary
    assert (summary["state"], summary["reason"], summary["updates"]) == ("done", "max_updates", 4)
    assert summary["staleness"]["violations"] == 0
    assert summary["evaluation"] == {**summary["evaluation"], "version": 4, "episodes": 4}
    assert json.loads((finished.directory / "summary.json").read_text()) == summary


def test_a_diagnosis_that_fails_costs_neither_history_nor_summary_nor_the_end(
    tmp_path, monkeypatch
):
    def fail(*_):
        raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr("tianflow.observability.diagnosis.diagnose", fail)
    finished = run(tmp_path)
    assert (finished.summary["state"], finished.summary["updates"]) == ("done", 4)
    assert json.loads((finished.directory / "summary.json").read_text()) == finished.summary
    rows = (finished.directory / "history.jsonl").read_text().splitlines()
    assert {"unknown"} == {json.loads(row)["bottleneck"] for row in rows}


def test_begun_is_trained_plus_dropped_at_the_end(tmp_path):
    counts = run(tmp_path).summary["trajectories"]
    assert counts["begun"] == counts["trained"] + sum(counts["dropped"].values())
    assert counts["open"] == 0


def test_a_run_whose_episodes_never_end_has_its_last_checkpoint_and_no_evaluation(tmp_path):
    """Evaluator and learner share one compute thread: the evaluation that is given up makes way for
    the checkpoint.
    """
    endless = {"id": "tests.support.environments:CounterEnv", "kwargs": {"length": 10**9}}
    finished = run(tmp_path, env=endless, evaluation={"timeout_s": 1.0})
    assert ("done", 4, {}) == tuple(
        finished.summary[name] for name in ("state", "updates", "evaluation")
    )
    assert ["v1-0000000004"] == [
        path.name for path in (finished.directory / "checkpoints").iterdir()
    ]


def test_a_resumed_run_goes_on_in_its_directory_at_its_version(tmp_path):
    first = run(tmp_path, run={"name": "one"})
    second = run(tmp_path, run={"max_updates": 6}, resume="one")
    assert second.directory == first.directory
    assert second.summary["updates"] == 6
    assert second.summary["env_steps"] > first.summary["env_steps"]
    assert {path.name for path in (second.directory / "checkpoints").iterdir()} == {
        "v1-0000000004",
        "v2-0000000006",
    }


def test_an_older_checkpoint_is_resumed_when_it_is_the_one_named(tmp_path):
    first = run(tmp_path, run={"name": "one"})
    run(tmp_path, run={"max_updates": 6}, resume="one")
    again = run(
        tmp_path, run={"max_updates": 5}, resume=first.directory / "checkpoints" / "v1-0000000004"
    )
    assert again.summary["updates"] == 5


def test_a_run_never_overwrites_another(tmp_path):
    run(tmp_path, run={"name": "one"})
    with pytest.raises(CheckpointError, match="--resume one"):
        run(tmp_path, run={"name": "one"})


async def test_train_where_a_loop_is_running_says_what_to_write_there_and_leaves_nothing(tmp_path):
    """In a notebook the directory would stay held for as long as that is open, and a second try be
    told that the run is going on.
    """
    with pytest.raises(RuntimeError, match=r"tianflow\.start"):
        run(tmp_path, run={"name": "one"})
    assert [] == list(tmp_path.iterdir())


async def test_a_directory_is_written_by_one_run_at_a_time(tmp_path):
    """What looks like a run that died may still be going on; two in one directory would
    spoil both.
    """
    named = cartpole(run={"max_updates": None, "name": "one"})
    async with tianflow.open_run(named, runs_dir=tmp_path) as handle:
        await until(lambda: handle.control.state == "running")
        handle.control.request_checkpoint(source="test")
        await until(handle.control.checkpoints)
        before = (tmp_path / "one" / "config.toml").stat()
        for options in ({"resume": "one"}, {}):
            with pytest.raises(CheckpointError, match="run 'one' is active; stop it first"):
                async with tianflow.open_run(
                    named, {"run.max_updates": 1}, runs_dir=tmp_path, **options
                ):
                    raise AssertionError("two runs in one directory")
        assert (tmp_path / "one" / "config.toml").stat() == before
        assert handle.control.state == "running"
    async with tianflow.open_run(named, resume="one", runs_dir=tmp_path) as again:
        assert again.control.state in ("starting", "running")


def test_the_policy_of_a_finished_run_acts_on_single_observations(tmp_path):
    policy = run(tmp_path).policy
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=3)
    state = None
    for _ in range(5):
        action, state = policy.act(observation, state)
        assert environment.action_space.contains(action)
        observation, *_ = environment.step(action)
    environment.close()


def test_a_recurrent_policy_remembers_between_calls(tmp_path):
    policy = run(tmp_path, network={"lstm": 8}).policy
    observation = np.zeros(4, np.float32)
    _, state = policy.act(observation)
    assert {name: tuple(value.shape) for name, value in state.items()} == {"h": (1, 8), "c": (1, 8)}
    assert any(bool(value.any()) for value in state.values())


def test_a_config_that_cannot_be_used_starts_nothing(tmp_path):
    with pytest.raises(ConfigError, match="CartPole-v1"):
        run(tmp_path, env={"id": "CartPol-v1"})
    assert list(tmp_path.iterdir()) == []


def test_a_memory_limit_that_holds_no_batch_starts_nothing(tmp_path):
    with pytest.raises(ConfigError, match="memory_limit"):
        run(tmp_path, balance={"memory_limit": 1000})
    assert list(tmp_path.iterdir()) == []


def test_a_failing_environment_ends_the_run_with_the_first_error(tmp_path):
    env = {"id": "tests.support.environments:RaisingEnv", "kwargs": {"at": 5}, "max_failures": 2}
    with pytest.raises(RunError, match="failed 3 times"):
        run(tmp_path, env=env)
    [directory] = tmp_path.iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["state"] == "failed"
    assert "failed 3 times" in summary["error"]


async def until(condition):
    while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
        await asyncio.sleep(0.01)


async def test_a_run_is_steered_while_it_goes_on_and_stopped_by_leaving(tmp_path):
    async with tianflow.open_run(ENDLESS, runs_dir=tmp_path) as handle:
        control = handle.control
        await until(lambda: control.statistics().ledger.updates > 2)
        assert await handle.balance.set(max_staleness=3) > 0
        assert control.config.bound == 3
        with pytest.raises(ConfigError, match="max_staleness"):
            await handle.balance.set(max_staleness=-1)
        assert control.config.bound == 3
        assert control.pause(source="test") == "paused"
        assert control.pause(source="test") == "paused"
        settled = control.statistics().ledger.updates
        await asyncio.sleep(0.2)
        assert control.statistics().ledger.updates <= settled + 1
        assert handle.run.snapshot.ready() == (True, ())
        assert control.resume(source="test") == "running"
        await until(lambda: control.statistics().ledger.updates > settled + 3)
    assert control.state == "stopped"
    with pytest.raises(StateConflictError):
        control.pause(source="test")
    actions = [record["action"] for record in control.audit()]
    assert actions == ["change", "pause", "resume"]


async def test_draining_trains_on_what_is_there_and_ends(tmp_path):
    async with tianflow.open_run(ENDLESS, runs_dir=tmp_path) as handle:
        await until(lambda: handle.control.statistics().ledger.updates > 2)
        assert handle.control.drain(source="test") == "draining"
        summary = await handle.wait()
    assert (summary["state"], summary["reason"]) == ("done", "drained")
    assert summary["trajectories"]["dropped"] == {}


async def test_a_wait_that_times_out_leaves_the_run_as_it_is(tmp_path):
    async with tianflow.open_run(ENDLESS, runs_dir=tmp_path) as handle:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.wait(), 0.01)
        seen = handle.control.statistics().ledger.updates
        await until(lambda: handle.control.statistics().ledger.updates > seen + 2)
        assert handle.control.state in {"starting", "running"}


async def test_a_cancelled_open_run_stops_with_a_checkpoint_of_its_last_update(tmp_path):
    async def training():
        async with tianflow.open_run(ENDLESS, runs_dir=tmp_path) as handle:
            handles.append(handle)
            await handle.wait()

    handles = []
    task = asyncio.create_task(training())
    await until(lambda: handles and handles[0].control.statistics().ledger.updates > 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (directory,) = tmp_path.iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    assert ("stopped", "open_run") == (summary["state"], summary["reason"])
    assert summary["updates"] == summary["checkpoint"]


def test_an_interrupted_train_stops_with_a_checkpoint_of_its_last_update(tmp_path):
    """The interrupt arrives once the first checkpoint is complete."""
    runs = tmp_path / "runs"

    def interrupt():
        while not list(runs.glob("one/checkpoints/v*")):
            if over.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    over = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(runs, run={"name": "one", "max_updates": None}, checkpoint={"every_s": 0.01})
    finally:
        over.set()
        thread.join()
    summary = json.loads((runs / "one" / "summary.json").read_text())
    assert ("stopped", "interrupt") == (summary["state"], summary["reason"])
    assert summary["updates"] == summary["checkpoint"] > 0


async def test_a_live_bound_wider_than_the_slots_have_room_for_is_bounded_by_them(tmp_path):
    """Slots of one process lie in one piece of memory, made at the start; more of them do not
    exist.
    """
    async with tianflow.open_run(NARROW, runs_dir=tmp_path) as handle:
        control = handle.control
        await until(lambda: control.statistics().ledger.updates > 2)
        await handle.balance.set(max_staleness=5000)
        before = control.statistics().ledger
        assert before.credits_limit <= before.slots <= 100_000 / 1000
        await until(
            lambda: (
                control.statistics().ledger.updates > before.updates + 60
                or control.state == "failed"
            )
        )
        assert control.state == "running"


@pytest.mark.parametrize(
    ("count", "reason"),
    [(300, "actors.count = 300: the memory limit holds .* trajectories"), (43_582_835, "4096")],
)
async def test_more_live_actors_than_memory_or_a_coordinator_has_room_for_are_refused_and_nothing_changes(
    tmp_path, count, reason
):
    async with tianflow.open_run(NARROW, runs_dir=tmp_path) as handle:
        control = handle.control
        await until(lambda: control.statistics().ledger.updates > 2)
        with pytest.raises(ConfigError, match=reason):
            control.change({"actors": {"count": count}}, source="test")
        assert control.config.actors.count == 1
        assert control.generation == 0


def test_only_a_terminal_is_told_the_token():
    session = tianflow.api.Session(SimpleNamespace(id="one"), None, "http://127.0.0.1:80", "secret")
    assert "run one, console at http://127.0.0.1:80/#token=secret" == train._address_line(
        session, terminal=True
    )
    assert "run one, control and metrics at http://127.0.0.1:80" == train._address_line(
        session, terminal=False
    )


@pytest.fixture
def hangups(request):
    """What a hangup does before there is a run, and again afterwards: end the process, or nothing
    (``nohup``).
    """
    before = signal.signal(signal.SIGHUP, request.param)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("hangups", "reason"),
    [(signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "SIGTERM")],
    indirect=["hangups"],
)
async def test_a_terminal_that_closes_ends_a_run_cleanly_however_often_it_hangs_up(hangups, reason):
    ended, said, at_once = [], [], asyncio.Event()
    run = SimpleNamespace(lifecycle=SimpleNamespace(end=lambda _state, why: ended.append(why)))
    signals = train._Signals(said.append, until_eof=False)
    signals.session = SimpleNamespace(run=run, finished=SimpleNamespace(cancel=at_once.set))
    with signals:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            assert not at_once.is_set()
            os.kill(os.getpid(), number)
            for _ in range(3):  # until the loop has heard of it
                await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(at_once.wait(), 5.0)
    assert ended == [reason]
    assert said == [f"{reason}: stopping with a last checkpoint; a second signal stops at once"]


def trained(tmp_path, **options):
    """``tianflow train`` in this process; its exit code."""
    chosen = {
        "resume": None,
        "runs_dir": tmp_path,
        "http": False,
        "plain": True,
        "json_line": False,
        "require_target": False,
    }
    return train.run(cartpole(run={"name": "one"}), **{**chosen, **options})


def test_a_run_ends_by_saying_where_its_policy_lies_and_what_can_be_done_with_it(tmp_path, capsys):
    assert trained(tmp_path) == 0
    kept = tmp_path / "one"
    assert capsys.readouterr().out.endswith(
        f"\n  saved in {kept}: tianflow eval {kept}, tianflow report {kept}\n"
    )


@pytest.mark.parametrize(
    ("sections", "trust"),
    [
        ({}, ""),
        ({"env": {"id": "tests.support.environments:CounterEnv"}}, " --trust"),
        ({"network": {"name": "tests.support.networks:Fitting"}}, " --trust"),
        ({"env": {"wrappers": ["gymnasium.wrappers:FlattenObservation"]}}, " --trust"),
    ],
)
def test_the_printed_command_trusts_where_an_evaluation_imports(sections, trust):
    steps = train._next_steps(Path("runs/a"), {"checkpoint": 4}, cartpole(**sections))
    assert f"\n  saved in runs/a: tianflow eval runs/a{trust}, tianflow report runs/a" == steps
    assert "" == train._next_steps(Path("runs/a"), {"checkpoint": None}, cartpole())


@pytest.mark.parametrize(
    ("evaluated", "returns", "differ"),
    [
        (-500.0, [-85.0] * 20, True),
        (-100.0, [-85.0] * 20, False),
        (500.0, [200.0] * 20, False),  # exploration costs return
        (0.0, [1.0, 1.0, 1.0, 0.0] * 5, True),
        (0.0, [0.0, 0.0, 0.0, 1.0] * 5, False),  # within the spread of episodes
        (-500.0, [-85.0] * 9, False),
    ],
)
def test_a_policy_that_needs_its_random_actions_is_noted(evaluated, returns, differ):
    found = train.disagreement({"mean_return": evaluated, "episodes": 100}, returns)
    assert differ == (found is not None)
    assert train.disagreement({"mean_return": evaluated, "episodes": 9}, returns) is None
    assert train.disagreement({}, returns) is None


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_note_on_random_actions_stands_at_the_end_of_training(
    tmp_path, monkeypatch, capsys, deterministic
):
    monkeypatch.setattr(train, "disagreement", lambda *_: "they differ")
    config = cartpole(evaluation={"deterministic": deterministic})
    options = {"resume": None, "http": False, "json_line": False, "require_target": False}
    assert 0 == train.run(config, runs_dir=tmp_path, plain=True, **options)
    assert deterministic == ("note: they differ" in capsys.readouterr().out)


def test_a_run_whose_policy_could_not_be_kept_says_so_and_has_not_succeeded(
    tmp_path, capsys, monkeypatch
):
    """What a full disk does to the last checkpoint must not look like success to a script."""

    def full(*_args, **_kwargs):
        raise CheckpointError("No space left on device")

    monkeypatch.setattr("tianflow.rundir.checkpoints.CheckpointStore.stage", full)
    assert trained(tmp_path) == 1
    told = capsys.readouterr().out
    assert "  no checkpoint was written, so 4 updates are lost\n" in told
    assert "kept in" not in told
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["checkpoint"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("json_line", [False, True])
def test_a_signal_does_not_hide_updates_that_the_last_checkpoint_could_not_hold(
    tmp_path, capsys, monkeypatch, number, json_line
):
    def full(*_args, **_kwargs):
        os.kill(os.getpid(), number)
        raise CheckpointError("No space left on device")

    monkeypatch.setattr("tianflow.rundir.checkpoints.CheckpointStore.stage", full)
    assert trained(tmp_path, json_line=json_line) == 1
    shown = capsys.readouterr()
    assert "so 4 updates are lost" in (shown.err if json_line else shown.out)


@pytest.mark.parametrize(
    ("summary", "caught", "code"),
    [
        ({"updates": 4, "checkpoint": 4}, [], 0),
        ({"updates": 4, "checkpoint": 4}, [signal.SIGINT], 130),
        ({"updates": 4, "checkpoint": 3}, [], 1),
        ({"updates": 4, "checkpoint": 3}, [signal.SIGTERM], 1),
        ({"updates": 4, "checkpoint": 3}, [signal.SIGTERM, signal.SIGINT], 143),
        ({}, [signal.SIGHUP], 129),
    ],
)
def test_lost_updates_outrank_one_signal_and_a_second_signal_gives_them_up(summary, caught, code):
    assert code == train._exit_code(summary, caught, require_target=False)


def test_a_run_goes_on_when_nobody_reads_what_it_says_any_more(tmp_path, monkeypatch):
    """As in ``tianflow train ... | head -1``."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as nobody:  # noqa: PTH123 - a descriptor has no path
        monkeypatch.setattr("sys.stdout", nobody)
        assert trained(tmp_path) == 0
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["checkpoint"] == 4


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("tianflow.core.devices.HAS_GPU", False)
    with pytest.raises(ConfigError, match="learner.device"):
        run(tmp_path, learner={"device": "cuda"})
    assert list(tmp_path.iterdir()) == []


def test_graphs_are_refused_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("tianflow.core.devices.HAS_GPU", False)
    with pytest.raises(ConfigError, match="learner.graphs.*no NVIDIA GPU"):
        tianflow.train(
            "impala", env="CartPole-v1", runs_dir=tmp_path, overrides={"learner.graphs": "on"}
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("learner", "path", "message"),
    [
        ({"device": "cuda:2"}, "learner.device", "2 GPUs, which are numbered from 0"),
        ({"device": "cuda", "ranks": 3}, "learner.ranks", "needs a GPU, and this machine has 2"),
    ],
)
def test_more_gpus_than_there_are_is_refused(tmp_path, monkeypatch, learner, path, message):
    monkeypatch.setattr("tianflow.core.devices.HAS_GPU", True)
    monkeypatch.setattr("tianflow.core.devices.GPUS", 2)
    with pytest.raises(ConfigError) as refusal:
        run(
            tmp_path / "runs",
            learner=learner,
            algorithm={"batch_trajectories": 3},
            placement={"launcher": "processes"},
        )
    (problem,) = refusal.value.problems
    assert path == problem.path
    assert message in problem.message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"network": {"hidden": [8]}}, "network.hidden"),
        ({"env": {"id": "Acrobot-v1"}}, "env.id"),
        ({"env": {"normalisation": {"observations": True}}}, "env.normalisation.observations"),
    ],
)
def test_a_resume_that_does_not_fit_its_checkpoint_is_refused_and_leaves_every_file_as_it_was(
    tmp_path, sections, path
):
    run(tmp_path, run={"name": "one"})
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=path):
        run(tmp_path, resume="one", **{"run": {"max_updates": 6}, **sections})
    assert before == contents(tmp_path)
    assert 6 == run(tmp_path, resume="one", run={"max_updates": 6}).summary["updates"]


def test_a_resume_writes_no_settings_before_its_learner_works(tmp_path):
    """What the checks cannot find may still fail; a plain resume continues then."""
    run(tmp_path, run={"name": "one"})
    before = contents(tmp_path)
    prepared = tianflow.api.prepare(cartpole(run={"max_updates": 6}), "one", tmp_path)
    os.close(prepared.held)
    assert (False, 1) == (prepared.settings_stored, prepared.revision)
    assert before == contents(tmp_path)


def test_a_run_whose_directory_was_renamed_resumes_under_its_new_name(tmp_path):
    run(tmp_path, run={"name": "one"})
    (tmp_path / "one").rename(tmp_path / "two")
    again = run(tmp_path, resume="two", run={"name": "one", "max_updates": 6})
    assert (tmp_path / "two", 6) == (again.directory, again.summary["updates"])


def test_settings_of_a_resume_are_in_force_afterwards_under_a_newer_revision(tmp_path):
    run(tmp_path, run={"name": "one"})
    run(tmp_path, resume="one", run={"max_updates": 6, "seed": 9})
    stored = tmp_path / "one" / "config.toml"
    assert (9, 1) == (load_config(stored).run.seed, read_revision(stored))


def test_a_resume_whose_limit_is_used_up_ends_at_once_and_changes_nothing(tmp_path, monkeypatch):
    run(tmp_path, run={"name": "one"})
    before = contents(tmp_path)
    monkeypatch.setattr("tianflow.api.prepare", lambda *_: 1 / 0)
    again = run(tmp_path, resume="one")
    assert (tmp_path / "one", "done", "max_updates", 4) == (
        again.directory,
        *(again.summary[name] for name in ("state", "reason", "updates")),
    )
    assert before == contents(tmp_path)


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
