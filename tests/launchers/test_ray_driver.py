"""The process with Ray, with a Ray that is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.harness import until
from tests.support.paths import ROOT
from tianflow.core.process_table import processes
from tianflow.launchers import ray_driver
from tianflow.launchers.ray_driver import BOOT, NodeStarter, RayNodes, RayOrder, RefusedError

JOIN = "the text of a join file\n"


class Starters:
    """Actors of a fake Ray. ``ends`` has what each run of a node gives: an error, or its answer."""

    def __init__(self, *ends: Any) -> None:
        self._ends = iter(ends)
        self.runs: list[dict[str, Any]] = []
        self.sees = SimpleNamespace(remote=self._sees)
        self.machine = SimpleNamespace(remote=self._machine)
        self.run = SimpleNamespace(remote=self._run)

    def options(self, **_: Any) -> Starters:
        return self

    def remote(self) -> Starters:
        return self

    async def _machine(self) -> str:
        return "one machine"

    async def _sees(self, path: str, digest: str) -> bool:
        return (
            Path(path).name == "join.toml" and hashlib.sha256(JOIN.encode()).hexdigest() == digest
        )

    async def _run(self, **given: Any) -> Any:
        self.runs.append(given)
        end = next(self._ends, None)
        if end is None:
            await asyncio.Event().wait()
        if isinstance(end, Exception):
            raise end
        return end


class LostError(Exception):
    """What Ray raises for an actor that is gone."""


def fake_ray(starters: Starters, *machines: float) -> Any:
    groups: list[tuple[list[dict[str, int]], str]] = []

    def placement_group(bundles: list[dict[str, int]], strategy: str) -> Any:
        groups.append((bundles, strategy))
        return SimpleNamespace(wait=lambda _: True)

    policy = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **_: None)
    return SimpleNamespace(
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in machines],
        remote=lambda _: starters,
        util=SimpleNamespace(placement_group=placement_group, scheduling_strategies=policy),
        exceptions=SimpleNamespace(RayError=LostError),
        groups=groups,
    )


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayOrder:
    monkeypatch.setattr(ray_driver, "BACK_OFF_S", (0.0, 0.0))
    (tmp_path / "join.toml").write_text(JOIN)
    return RayOrder("auto", 2, 4, str(tmp_path / "join.toml"), "demo")


async def for_a_while(nodes: RayNodes) -> None:
    task = asyncio.create_task(nodes.run())
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def messages(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("machines", "strategy"),
    [((4.0, 8.0), "STRICT_SPREAD"), ((8.0,), "SPREAD"), ((8.0, 2.0), "SPREAD")],
)
async def test_nodes_share_machines_only_where_there_are_too_few_that_are_large_enough(
    order: RayOrder,
    machines: tuple[float, ...],
    strategy: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ray = fake_ray(Starters(), *machines)
    await for_a_while(RayNodes(order, JOIN, ray))
    assert [([{"CPU": 4}, {"CPU": 4}], strategy)] == ray.groups
    warned = [message for message in messages(capsys) if "warning" in message]
    assert (strategy == "SPREAD") == bool(warned)


async def test_nodes_of_one_machine_have_places_of_their_own_and_read_the_file_there(
    order: RayOrder,
) -> None:
    starters = Starters()
    await for_a_while(RayNodes(order, JOIN, fake_ray(starters, 8.0)))
    assert [("ray-0", 0, ""), ("ray-1", 1, "")] == [
        (run["name"], run["place"], run["text"]) for run in starters.runs
    ]


async def test_a_machine_that_does_not_see_the_file_gets_its_text(order: RayOrder) -> None:
    starters = Starters()
    nodes = RayNodes(order, JOIN, fake_ray(starters, 8.0))
    nodes._digest = "that of another file"
    await for_a_while(nodes)
    assert {JOIN} == {run["text"] for run in starters.runs}


async def test_a_node_that_ray_has_lost_starts_again_under_another_name(
    order: RayOrder, capsys: pytest.CaptureFixture[str]
) -> None:
    starters = Starters(LostError("the actor is dead\nat length"), (1, ["killed"]), (0, []))
    await for_a_while(RayNodes(order, JOIN, fake_ray(starters, 8.0)))
    assert {"ray-0", "ray-1", "ray-0.1", "ray-1.1"} <= {run["name"] for run in starters.runs}
    shown = {text: message for message in messages(capsys) for text in message.values()}
    assert "the actor is dead" == shown["Ray has lost a node, and starts it again"]["why"]
    assert "killed" == shown["a node has failed"]["output"]
    assert "a node has ended" in shown


async def test_the_run_ends_when_every_node_is_refused_and_not_before(order: RayOrder) -> None:
    refused = (2, ["its python is '3.9'"])
    starters = Starters(refused, (0, []), (1, []), refused, refused)
    with pytest.raises(ExceptionGroup) as caught:
        await RayNodes(order, JOIN, fake_ray(starters, 8.0)).run()
    (error,) = caught.value.exceptions
    assert isinstance(error, RefusedError)
    assert "every node was refused:\nits python is '3.9'" == str(error)


# The actor
# --------------------------------------------------------------------------------------------------


def test_a_file_is_seen_if_its_contents_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "join.toml"
    digest = hashlib.sha256(JOIN.encode()).hexdigest()
    assert not NodeStarter().sees(str(path), digest)
    path.write_text("of another cluster")
    assert not NodeStarter().sees(str(path), digest)
    path.write_text(JOIN)
    assert NodeStarter().sees(str(path), digest)


@pytest.mark.e2e
def test_a_node_has_the_text_in_a_file_of_its_own_and_its_exit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, lines = NodeStarter().run(
        name="ray-0", path="/nowhere/join.toml", text=JOIN, place=0, cpus=1, environment={}
    )
    assert 2 == code
    # Not its mode, and not its absence, is what the node complains of.
    assert f"join file = '{tmp_path}/" in lines[-1]
    assert "is not a join file" in lines[-1]
    assert [] == list(tmp_path.iterdir())


@pytest.mark.e2e
@pytest.mark.parametrize("stopped", [False, True])
def test_a_node_leaves_when_ray_kills_its_actor(tmp_path: Path, *, stopped: bool) -> None:
    """Also one that is stopped: it would stay with its hosts."""
    log = tmp_path / "log"
    actor = (
        "from tianflow.launchers.ray_driver import NodeStarter\n"
        f"NodeStarter().run(name='n', path={str(tmp_path / 'join.toml')!r}, text='', place=0, "
        "cpus=1, environment={})"
    )
    with (
        log.open("w") as out,
        subprocess.Popen([sys.executable, "-c", actor], stdout=out, cwd=ROOT) as process,
    ):
        until("the node works", lambda: "waiting for a run" in log.read_text())
        (node,) = children(process.pid)
        if stopped:
            os.kill(node, signal.SIGSTOP)
            until("it is stopped", lambda: state(node) == "T")
        process.kill()
    try:
        until("the node has left", lambda: state(node) in "ZX", within_s=10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(node, signal.SIGKILL)


def children(parent: int) -> list[int]:
    return [entry.pid for entry in processes() if entry.parent == parent]


def state(pid: int) -> str:
    return next((entry.state for entry in processes() if entry.pid == pid), "X")


def test_a_node_whose_actor_is_gone_already_does_not_start() -> None:
    command = [sys.executable, "-c", BOOT, "1", sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (1, "") == (done.returncode, done.stdout)


def test_a_stopped_driver_ends_with_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "join.toml").write_text(JOIN)
    order = {"address": "auto", "nodes": 1, "cpus": 1, "run": "demo"}
    line = json.dumps(order | {"join_file": str(tmp_path / "join.toml")})
    driver = (
        "import pathlib, sys\nfrom tianflow.launchers import ray_driver\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "def connect(*_):\n    (here / 'works').touch()\n"
        "    sys.stdin.read()\n    (here / 'ended').touch()\n"
        "ray_driver.connect = connect\nray_driver.main()"
    )
    coordinator = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        f"command = [sys.executable, '-c', {driver!r}]\n"
        "driver = subprocess.Popen(command, stdin=-1, stderr=-3, start_new_session=True)\n"
        f"driver.stdin.write({line!r}.encode() + b'\\n')\ndriver.stdin.flush()\n"
        "while not (here / 'works').exists():\n    time.sleep(0.01)\n"
        "os.kill(driver.pid, signal.SIGSTOP)\n"
        "os.waitid(os.P_PID, driver.pid, os.WSTOPPED | os.WNOWAIT)\n"
        "(here / 'stopped').write_text(str(driver.pid))\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", coordinator]) as process:
        stopped = tmp_path / "stopped"
        until("the driver is stopped", lambda: stopped.exists() and stopped.read_text())
        process.kill()
    try:
        until("the driver has ended", (tmp_path / "ended").exists, within_s=10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(stopped.read_text()), signal.SIGKILL)
