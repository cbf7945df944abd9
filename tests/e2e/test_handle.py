"""Handles of real runs: started by a program, by the command line, by a service, and on a loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import tianflow
from tests.e2e.harness import until
from tests.support.paths import ROOT
from tests.support.settings import cartpole
from tianflow.errors import (
    CheckpointError,
    ConfigError,
    RunError,
    RunTimeoutError,
    StateConflictError,
)
from tianflow.rundir.control_file import ControlFile
from tianflow.rundir.summary import EOF, read_summary

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium"),
]

ENDLESS = cartpole(run={"name": "one", "max_updates": None}, learner={"slowdown": 10.0})
"""Its learner rests most of the time: it would otherwise take both cores from the tests beside it.
"""
END_S = 90.0
"""Seconds; far more than the end of a run takes, on a busy machine."""
MODULES = os.pathsep.join((str(ROOT), str(ROOT / "controllers")))


def trains(handle: tianflow.RunHandle, *, updates: int = 2) -> None:
    until(
        "updates", lambda: handle.status().get("progress", {}).get("updates", 0) >= updates or None
    )


def test_a_run_is_watched_and_controlled_while_it_goes_on_and_leaving_stops_it(
    tmp_path: Path,
) -> None:
    seen: list[Any] = []
    with tianflow.start(ENDLESS, runs_dir=tmp_path) as handle:
        assert (tmp_path / "one", "one") == (handle.directory, handle.id)
        handle.on("settings", lambda event: seen.append(event.data["paths"]))
        trains(handle)
        assert handle.set({"balance.max_staleness": 4}) > 0
        assert 4 == handle.status()["staleness"]["bound"]
        with pytest.raises(ConfigError, match="max_staleness"):
            handle.set(balance={"max_staleness": -1})
        assert "paused" == handle.pause()
        assert "running" == handle.resume()
        handle.checkpoint()
        until("checkpoint", lambda: list((tmp_path / "one" / "checkpoints").glob("v*")))
        assert handle.policy().act([0.0, 0.0, 0.0, 0.0])[0] in {0, 1}
        second = tianflow.attach("one", runs_dir=tmp_path)
        assert second.status()["id"] == "one"
        kinds = {event.kind for event in second.events(follow=False)}
        assert "update-finished" in kinds
    assert [["balance.max_staleness"]] == seen
    summary = second.wait()
    assert ("stopped", EOF) == (summary["state"], summary["reason"])
    assert summary["checkpoint"] == summary["updates"]
    assert handle.metrics()[-1]["train/n_updates"] > 0
    assert handle.metrics(arrays=True)["t"].shape == (len(handle.metrics()),)


def test_a_run_that_ends_by_itself_returns_its_summary(tmp_path: Path) -> None:
    handle = tianflow.start(cartpole(run={"name": "one"}), runs_dir=tmp_path)
    evaluations: list[Any] = []
    handle.on("evaluation", lambda event: evaluations.append(event.data["version"]))
    summary = handle.wait(END_S)
    assert ("done", "max_updates", 4) == tuple(
        summary[name] for name in ("state", "reason", "updates")
    )
    assert [4] == evaluations
    assert read_summary(tmp_path / "one") == summary
    again = tianflow.start(cartpole(run={"name": "one"}), resume="one", runs_dir=tmp_path)
    assert 4 == again.wait()["updates"]
    more = cartpole(run={"max_updates": 6})
    with tianflow.start(more, resume="one", runs_dir=tmp_path) as resumed:
        assert 6 == resumed.wait(END_S)["updates"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config": cartpole(env={"id": "CartPol-v1"})}, ConfigError, "CartPol-v1"),
        ({"config": cartpole(), "resume": "none"}, CheckpointError, "none"),
        (
            {"config": cartpole(env={"id": "tests.support.environments:RaisingEnv",
                                     "kwargs": {"where": "constructor"}})},
            ConfigError,
            "EnvironmentBrokeError",
        ),
    ],
)  # fmt: skip
def test_a_refusal_is_the_error_of_the_library_and_starts_nothing(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        tianflow.start(**options, runs_dir=tmp_path)
    assert [] == list(tmp_path.iterdir())
    if isinstance(caught.value, ConfigError):
        assert "env.id" == caught.value.problems[0].path


def test_a_run_that_fails_raises_its_first_error_with_its_traceback(tmp_path: Path) -> None:
    env = {"id": "tests.support.environments:RaisingEnv", "kwargs": {"at": 5}, "max_failures": 2}
    handle = tianflow.start(cartpole(run={"name": "one"}, env=env), runs_dir=tmp_path)
    with pytest.raises(RunError, match="failed 3 times") as caught:
        handle.wait(END_S)
    assert "EnvironmentBrokeError" in caught.value.details
    assert "failed" == handle.status()["state"]
    with pytest.raises(RunError, match="failed 3 times"):
        tianflow.attach("one", runs_dir=tmp_path).wait()


def test_a_killed_run_is_crashed_and_can_be_resumed(tmp_path: Path) -> None:
    handle = tianflow.start(ENDLESS, runs_dir=tmp_path)
    trains(handle)
    handle.checkpoint()
    until("checkpoint", lambda: list((tmp_path / "one" / "checkpoints").glob("v*")))
    contact = ControlFile.read(tmp_path / "one")
    assert contact is not None
    os.kill(contact.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="without a summary"):
        handle.wait(END_S)
    assert "crashed" == handle.status()["state"]
    with tianflow.start(ENDLESS, resume="one", runs_dir=tmp_path) as resumed:
        assert resumed.status()["progress"]["updates"] >= 1


def test_a_taken_name_is_refused_a_wait_times_out_and_a_stop_by_another_handle_ends_it(
    tmp_path: Path,
) -> None:
    with tianflow.start(ENDLESS, runs_dir=tmp_path) as run:
        with pytest.raises(CheckpointError, match="one"):
            tianflow.start(ENDLESS, runs_dir=tmp_path)
        assert run.status()["state"] in {"starting", "running"}
        with pytest.raises(RunTimeoutError, match="has not ended after 0.1 s"):
            run.wait(timeout=0.1)
        trains(run)
        assert "stopping" == tianflow.attach("one", runs_dir=tmp_path).stop()
        assert "stopped" == run.wait(END_S)["state"]
        with pytest.raises(StateConflictError, match="has ended"):
            run.stop()


def test_an_error_in_the_block_stops_the_run_and_is_the_one_that_is_raised(tmp_path: Path) -> None:
    handle = tianflow.start(ENDLESS, runs_dir=tmp_path)

    def block() -> None:
        with handle:
            trains(handle)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert "stopped" == handle.wait()["state"]


def program(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": MODULES, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal sends Ctrl-C to a group of processes
    )


STARTS = """
    import time
    import tianflow
    from tests.support.settings import cartpole

    run = tianflow.start(cartpole(run={"name": "one", "max_updates": None}))
    while run.status().get("progress", {}).get("updates", 0) < 2:
        time.sleep(0.05)
"""


def summary_after_the_end(runs: Path) -> dict[str, Any]:
    return until("the end of the run", lambda: read_summary(runs / "one"), within_s=END_S)


async def test_a_handle_works_beside_a_running_loop_as_in_a_notebook(tmp_path: Path) -> None:
    """A cell of a notebook runs in a thread with a loop; what blocks is done in another thread here,
    because tests refuse a blocked loop.
    """
    handle = await asyncio.to_thread(tianflow.start, ENDLESS, runs_dir=tmp_path)
    await asyncio.to_thread(trains, handle)
    await asyncio.to_thread(handle.stop)
    assert "stopped" == (await asyncio.to_thread(handle.wait, END_S))["state"]


def test_start_does_not_refuse_a_thread_with_a_running_loop(tmp_path: Path) -> None:
    text = """
    import asyncio
    import tianflow
    from tests.support.settings import cartpole

    async def cell():
        run = tianflow.start(cartpole(run={"name": "one"}))
        print(run.wait()["state"])

    asyncio.run(cell())
    """
    with program(tmp_path, text) as done:
        out, err = done.communicate(timeout=END_S)
    assert (0, "done\n") == (done.returncode, out), err


async def test_a_run_on_the_loop_has_the_same_methods_with_await(tmp_path: Path) -> None:
    seen: list[int] = []
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _loop, context: failures.append(context["message"])
    )
    async with tianflow.open_run(ENDLESS, runs_dir=tmp_path) as handle:
        handle.on("settings", lambda event: seen.append(event.data["generation"]))
        handle.on("settings", lambda _event: 1 / 0)
        async for event in handle.events():
            if event.kind == "update-finished" and event.data["version"] >= 2:
                break
        generation = await handle.set({"balance.max_staleness": 4, "actors.count": 2})
        assert 4 == (await handle.status())["staleness"]["bound"]
        assert "paused" == await handle.pause()
        assert "running" == await handle.resume()
        with pytest.raises(RunTimeoutError, match="has not ended after 0.01 s"):
            await handle.wait(timeout=0.01)
        await handle.stop()
        assert "stopped" == (await handle.wait(END_S))["state"]
        assert (await handle.policy()).act([0.0] * 4)[0] in {0, 1}
    assert [generation] == seen
    assert ["a callback for 'settings-changed' of run 'one' failed"] == failures


TYPED = """
import tianflow

run = tianflow.start("cartpole_ppo", {"balance.max_staleness": 1})
summary = run.wait(5.0)
state: str = run.pause()
loss: float = run.metrics(arrays=True)["train/loss"][-1].item()
rows: list[dict[str, object]] = [dict(row) for row in run.metrics()]
for event in run.events():
    kind: str = event.kind
action, memory = run.policy().act([0.0])
done = tianflow.train("ppo", env="CartPole-v1")
print(done.summary["state"], done.policy)
"""


@pytest.mark.beside
def test_types_of_the_public_names_are_known_to_a_user(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(TYPED + "run.paus()\nstopped: int = run.stop()\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(path)],  # `make lint` leaves a cache in this folder
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": MODULES},
        capture_output=True,
        text=True,
        check=False,
    )
    last = len(path.read_text().splitlines())
    # the cache has the directory of an earlier run of this test
    assert [(f"script.py:{last - 1}", "[attr-defined]"), (f"script.py:{last}", "[assignment]")] == [
        (line.partition(": ")[0].rpartition("/")[2], line.split()[-1])
        for line in done.stdout.splitlines()
        if "error:" in line
    ]


@pytest.mark.beside
def test_a_run_stops_with_a_checkpoint_when_its_program_exits(tmp_path: Path) -> None:
    with program(tmp_path, STARTS) as done:
        assert "" == done.communicate(timeout=END_S)[1]
    summary = summary_after_the_end(tmp_path / "runs")
    assert ("stopped", EOF) == (summary["state"], summary["reason"])
    assert summary["checkpoint"] == summary["updates"] >= 2


@pytest.mark.beside
def test_a_run_stops_with_a_checkpoint_when_its_program_is_killed(tmp_path: Path) -> None:
    with program(tmp_path, STARTS + "\n    print('ready', flush=True)\n    run.wait()\n") as done:
        assert done.stdout is not None
        assert "ready\n" == done.stdout.readline()
        done.kill()
    summary = summary_after_the_end(tmp_path / "runs")
    assert summary["checkpoint"] == summary["updates"] >= 2


@pytest.mark.beside
def test_ctrl_c_in_a_wait_ends_the_wait_and_not_the_run(tmp_path: Path) -> None:
    text = (
        STARTS
        + """
    try:
        print('ready', flush=True)
        run.wait()
    except KeyboardInterrupt:
        print(run.status()["state"], flush=True)
        before = run.status()["progress"]["updates"]
        while run.status()["progress"]["updates"] <= before:
            time.sleep(0.05)
        run.stop()
        print(run.wait()["state"], flush=True)
    """
    )
    with program(tmp_path, text) as done:
        assert done.stdout is not None
        assert "ready\n" == done.stdout.readline()
        os.killpg(done.pid, signal.SIGINT)
        out, err = done.communicate(timeout=END_S)
    assert (0, ["running", "stopped"]) == (done.returncode, out.split()), err


@pytest.mark.beside
def test_a_run_of_a_service_has_a_handle_from_its_queue_to_its_end(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": MODULES, "OMP_NUM_THREADS": "1"}
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "tianflow"]
    with (tmp_path / "log").open("w") as log:
        service = subprocess.Popen(
            [*command, "serve", "--port", "0", "--max-runs", "1", "--runs-dir", str(runs)],
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until("the service", lambda: ControlFile.read(runs, "service.json"), within_s=END_S)
        for name in ("first", "second"):
            settings = [f"run.name={name}", "run.target_return=null", "run.max_env_steps=null"]
            done = subprocess.run(
                [*command, "submit", "cartpole_ppo", *settings, "--runs-dir", str(runs)],
                env=environment, check=False, capture_output=True, text=True,
            )  # fmt: skip
            assert 0 == done.returncode, done.stderr
        waiting = tianflow.attach("second", runs_dir=runs)
        assert "pending" == waiting.status()["state"]
        contact = ControlFile.read(runs, "service.json")
        assert contact is not None
        far = tianflow.attach("first", address=contact.address, token=contact.token)
        trains(far)
        far.set({"balance.max_staleness": 3})
        assert 3 == far.status()["staleness"]["bound"]
        far.stop()
        assert "stopped" == far.wait(END_S)["state"]
        assert "stopped" == tianflow.attach("first", runs_dir=runs).wait(END_S)["state"]
        trains(waiting)
        waiting.stop()
        assert "stopped" == waiting.wait(END_S)["state"]
    finally:
        service.terminate()
        service.wait(END_S)
