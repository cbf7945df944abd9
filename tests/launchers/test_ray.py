"""The launcher ``ray`` without a Ray: what is refused, and what it makes of its driver's messages."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.harness import until
from tests.support.paths import ROOT
from tianflow import api
from tianflow.config.loading import load_config
from tianflow.core import devices
from tianflow.errors import ConfigError, RunError
from tianflow.launchers import ray as launcher
from tianflow.launchers.ray import RayLauncher

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("output of Ray", flush=True)
sys.stdin.read()
time.sleep(60)
"""


def without_ray(monkeypatch: pytest.MonkeyPatch, *, found: bool) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (found or None) if name == "ray" else find(name)
    )


def view(*overrides: str) -> Any:
    config = load_config("cartpole_ppo", ["placement.launcher=ray", *overrides])
    return SimpleNamespace(
        id="demo", settings=SimpleNamespace(value=SimpleNamespace(config=config))
    )


RUN = view()
LARGER = view("ray.nodes=3", "ray.cpus_per_node=2", "ray.address=10.0.0.1:6379")


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Replaces the process with Ray by a program."""

    def install(program: str) -> None:
        (tmp_path / "scripted_driver.py").write_text(program)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(launcher, "DRIVER", "scripted_driver")

    return install


def test_a_machine_without_ray_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_ray(monkeypatch, found=False)
    with pytest.raises(ConfigError) as caught:
        RayLauncher().prepare()
    assert (
        "placement.launcher = 'ray': needs the package ray, which is not installed; accepted: pip "
        'install -c constraints.txt -e ".[ray]", or another launcher'
    ) == str(caught.value)
    without_ray(monkeypatch, found=True)
    RayLauncher().prepare()


def test_a_learner_on_a_gpu_that_this_machine_does_not_have_is_refused_with_how_to_submit_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "HAS_GPU", False)
    settings = ["placement.launcher=ray", "learner.device=cuda"]
    with pytest.raises(ConfigError, match="learner.device = 'cuda'.*ray job submit .*--entryp"):
        api.prepare(load_config("cartpole_ppo", settings), None, tmp_path)
    settings[0] = "placement.launcher=processes"
    with pytest.raises(ConfigError, match="learner.device = 'cuda'.*a machine with a GPU$"):
        api.prepare(load_config("cartpole_ppo", settings), None, tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ray.adress=auto", "ray.adress = .*did you mean 'address'"),
        ("ray.nodes=0", "ray.nodes = 0: .*>= 1"),
        ("ray.cpus_per_node=0", "ray.cpus_per_node = 0"),
        ("ray.address=", "ray.address = ''"),
        ("ray.address=ray://head:10001", "ray.address = 'ray://head:10001'"),
    ],
)
def test_a_setting_that_ray_could_not_have_is_refused_by_its_path(
    override: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("cartpole_ppo", [override])


def test_neither_the_launcher_nor_the_actor_of_ray_imports_ray() -> None:
    program = (
        "import sys; import tianflow.launchers.ray, tianflow.launchers.ray_driver, tianflow.api; "
        "sys.exit('ray' in sys.modules)"
    )
    assert 0 == subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode


async def test_a_reason_of_the_driver_ends_the_run(
    driven: Callable[[str], None], tmp_path: Path
) -> None:
    driven("import json\nprint(json.dumps({'failed': 'every node was refused'}))")
    with pytest.raises(RunError) as caught:
        await RayLauncher().provide(tmp_path / "join.toml", RUN)
    assert ("ray", "every node was refused") == (caught.value.component, caught.value.summary)


async def test_a_driver_that_dies_ends_the_run_with_its_last_words(
    driven: Callable[[str], None], tmp_path: Path
) -> None:
    driven("raise ZeroDivisionError('words of Ray')")
    with pytest.raises(RunError) as caught:
        await RayLauncher().provide(tmp_path / "join.toml", RUN)
    assert "the process with Ray ended with exit code 1" == caught.value.summary
    assert "ZeroDivisionError: words of Ray" in caught.value.details


async def test_the_driver_gets_the_order_and_the_end_of_the_run(
    driven: Callable[[str], None], tmp_path: Path
) -> None:
    driven(
        "import pathlib, sys\nhere = pathlib.Path(__file__).parent\n"
        "(here / 'order').write_text(sys.stdin.readline())\n"
        "(here / 'end').write_text(sys.stdin.read() + 'end')\n"
    )
    task = asyncio.create_task(RayLauncher().provide(tmp_path / "join.toml", LARGER))
    order = tmp_path / "order"
    await asyncio.to_thread(until, "the order", lambda: order.exists() and order.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (
        '{"address": "10.0.0.1:6379", "nodes": 3, "cpus": 2, "join_file": '
        f'"{tmp_path}/join.toml", "run": "demo"}}\n'
    ) == order.read_text()
    assert "end" == (tmp_path / "end").read_text()


async def test_a_driver_that_does_not_end_is_killed(
    driven: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven(STUBBORN)
    monkeypatch.setattr(launcher, "END_S", 0.1)
    seen = asyncio.Event()

    def show(_message: object) -> str:
        seen.set()
        return ""

    monkeypatch.setattr(launcher, "_show", show)
    task = asyncio.create_task(RayLauncher().provide(tmp_path / "join.toml", RUN))
    await seen.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
