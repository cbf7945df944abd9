"""Tests of the comparison with peers: target rule, answers, environments, and rows of missing peers."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command_line
from benchmarks.lib import child, machine, results
from benchmarks.lib.harness import BenchmarkError, Plan, Side, alternate
from benchmarks.peers import (
    common,
    comparison,
    factory_appo,
    install,
    rllib_algorithms,
    torchrl_served,
)
from benchmarks.peers import table as peers_table
from benchmarks.peers.common import Lag, Progress, Task, read_task
from benchmarks.peers.comparison import Rival
from benchmarks.suites import peers_cartpole, peers_pong, peers_served
from tianflow.config.loading import load_config
from tianflow.core.statistics import LATENCY_BUCKETS

CARTPOLE = Task("cartpole", 1, 475.0, 60.0, 0.0, {})
RIVAL = Rival("the other", "cleanrl", "some_child", "as it comes")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def progress(task: Task = CARTPOLE) -> tuple[Progress, Clock]:
    clock = Clock()
    made = Progress(task, clock=clock, age=lambda: clock.now + 7.0)
    made.start()
    return made, clock


# The rule of the target
# ------------------------------------------------------------------------------------------------


def test_the_target_is_reached_when_the_last_100_episodes_average_it() -> None:
    made, clock = progress()
    clock.now = 1.0
    assert not made.observe(100, [474.0] * 100)
    clock.now = 2.0
    assert made.observe(200, [500.0] * 4)  # (96 * 474 + 4 * 500) / 100 = 475.04
    assert (2.0, 9.0, 200) == (made.time_to_target_s, made.start_to_target_s, made.steps_to_target)
    clock.now = 3.0
    made.observe(300, [500.0])
    assert 2.0 == made.time_to_target_s


def test_fewer_than_100_episodes_reach_nothing() -> None:
    made, _ = progress()
    assert not made.observe(99, [500.0] * 99)
    assert made.time_to_target_s is None
    assert made.observe(100, [500.0])


def test_only_the_last_100_episodes_count() -> None:
    made, _ = progress()
    assert not made.observe(1, [0.0] * 100)
    assert made.observe(2, [475.0] * 100)
    assert 475.0 == made.mean_return


def test_the_same_rule_holds_for_a_peer_that_keeps_the_mean_itself() -> None:
    made, _ = progress()
    assert [False, False, True] == [
        made.observe_mean(1, mean, episodes)
        for mean, episodes in ((None, 0), (490.0, 99), (475.0, 100))
    ]


def test_training_ends_when_its_time_is_up_without_the_target() -> None:
    made, clock = progress()
    clock.now = 59.9
    assert not made.observe(5_000)
    clock.now = 60.0
    assert made.observe(6_000, [1.0])
    assert (None, None, None, 1.0) == (
        made.time_to_target_s,
        made.start_to_target_s,
        made.steps_to_target,
        made.mean_return,
    )
    assert 100.0 == made.steps_per_s


def test_the_clock_starts_when_everything_is_made() -> None:
    clock = Clock()
    made = Progress(CARTPOLE, clock=clock, age=clock)
    clock.now = 10.0
    made.start()
    clock.now = 12.0
    made.observe(10)
    assert (2.0, 5.0) == (made.training_s, made.steps_per_s)


def test_the_rate_is_from_the_first_observation_after_the_warm_up_to_the_last() -> None:
    made, clock = progress(Task("pong", 1, None, 60.0, 10.0, {}))
    for now, steps in ((0.0, 0), (8.0, 80), (12.0, 100), (20.0, 900), (61.0, 5_000)):
        clock.now = now
        over = made.observe(steps)
    assert over
    assert pytest.approx((5_000 - 100) / 49.0) == made.steps_per_s


def test_the_measurement_begins_with_the_first_observation_after_the_warm_up() -> None:
    made, clock = progress(Task("pong", 1, None, 60.0, 10.0, {}))
    begun = []
    for clock.now in (8.0, 12.0):
        made.observe(100)
        begun.append(made.is_warm)
    assert [False, True] == begun


def test_the_rate_needs_a_second_observation_after_the_warm_up() -> None:
    made, clock = progress(Task("pong", 1, None, 60.0, 10.0, {}))
    clock.now = 12.0
    made.observe(100)
    assert made.steps_per_s is None


def test_no_return_ends_training_without_a_target() -> None:
    made, _ = progress(Task("pong", 1, None, 60.0, 0.0, {}))
    assert not made.observe(1, [1000.0] * 100)
    assert made.time_to_target_s is None


def test_lag_is_the_mean_of_means_and_the_largest_maximum() -> None:
    lag = Lag("updates")
    assert {"lag_mean": None, "lag_max": None, "lag_unit": "updates"} == lag.summary()
    for mean, most in ((1.0, 3.0), (float("nan"), 9.0), (2.0, 2.0)):
        lag.add(mean, most)
    assert {"lag_mean": 1.5, "lag_max": 3.0, "lag_unit": "updates"} == lag.summary()


# Tasks and answers of scripts
# ------------------------------------------------------------------------------------


def test_a_task_is_read_from_the_command_line_and_misleading_variables_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(machine.UNSET[0], "X")
    given = ["pong", "--seed", "3", "--target", "9", "--seconds", "50", "--warm", "5", "epochs=1"]
    assert Task("pong", 3, 9.0, 50.0, 5.0, {"epochs": "1"}) == read_task("", given)
    assert machine.UNSET[0] not in os.environ


@pytest.mark.parametrize("given", [["tetris"], ["pong", "epochs"], []])
def test_an_invalid_task_is_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_task("", given)


def test_the_answer_is_alone_on_standard_output_when_libraries_print() -> None:
    text = """
import os
from benchmarks.peers.common import Progress, Reporter, Task
reporter = Reporter()
print("chatter of a library")
os.system("echo chatter of another process")
task = Task("cartpole", 1, 475.0, 60.0, 0.0, {})
progress = Progress(task)
progress.observe(64, [1.0, 3.0])
reporter.report(task, progress, peer="it", clock_starts="now", settings={"n": 1}, packages=("pytest", "no-such-package"), more=2)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=machine.ROOT, capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    assert {
        "peer": "it",
        "env_steps": 64,
        "mean_return": 2.0,
        "lag_mean": None,
        "settings": {"n": 1},
        "more": 2,
    }.items() <= answer.items()
    assert {"pytest"} == set(answer["versions"])
    assert ["chatter of a library", "chatter of another process"] == sorted(
        done.stderr.splitlines()
    )


def test_a_process_knows_its_age() -> None:
    text = (
        "import time; time.sleep(0.3); from benchmarks.peers.common import process_age_s; "
        "print(process_age_s())"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=machine.ROOT, capture_output=True, text=True, check=True
    )
    assert 0.3 <= float(done.stdout) <= time.monotonic() - began + 0.02


def test_the_processor_time_of_a_tree_includes_children() -> None:
    text = """
import subprocess, sys, time
from benchmarks.peers.common import tree_seconds
with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(tree_seconds() - time.process_time())
    child.kill()
"""
    work = """
import time
while time.process_time() < 0.3: pass
print(flush=True)
time.sleep(600)
"""
    done = subprocess.run(
        [sys.executable, "-c", text, work],
        cwd=machine.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.25 <= float(done.stdout) < 0.6


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of TorchRL's transport. Its base class records what it gets."""

    class Slots:
        def __init__(self, request: Any, response: Any, *, num_slots: int, ctx: Any) -> None:
            self.made = (request, response, num_slots, ctx.get_start_method())
            self.answered: list[tuple[list[int], Any]] = []

        def drain_slots(self, max_items: int) -> tuple[list[int], list[float]]:
            ready = [(2, 10.0), (0, 10.5)][:max_items]
            return [slot for slot, _ in ready], [at for _, at in ready]

        def resolve_batch(self, slots: list[int], results: Any) -> None:
            self.answered.append((slots, results))

    package: Any = types.ModuleType("torchrl.modules.inference_server")
    package.ProcessSlotTransport = Slots
    for name in ("torchrl", "torchrl.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.torchrl_timed", raising=False)
    yield importlib.import_module("benchmarks.peers.torchrl_timed")
    del sys.modules["benchmarks.peers.torchrl_timed"]


def test_torchrls_requests_are_counted_by_the_time_from_request_to_answer(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = timed.TimedTransport("request", "response", count=3, edges=(0.5, 1.0))
    assert ("request", "response", 3, "spawn") == made.made
    clock = Clock()
    monkeypatch.setattr(timed.time, "monotonic", clock)
    assert (0, [0, 0, 0]) == made.read()
    assert ([2, 0], [10.0, 10.5]) == made.drain_slots(8)
    clock.now = 11.0
    made.resolve_batch([2, 0], "answers")
    assert (1, [1, 1, 0]) == made.read()
    made.drain_slots(1)
    clock.now = 11.25
    made.resolve_batch([2], "answer")
    assert (2, [1, 1, 1]) == made.read()
    assert [([2, 0], "answers"), ([2], "answer")] == made.answered


def test_a_window_of_torchrls_server_is_between_two_snapshots() -> None:
    first = torchrl_served.Snapshot(10.0, 3.0, 5, [1, 2, 3])
    last = torchrl_served.Snapshot(30.0, 33.0, 25, [11, 2, 33])
    assert {
        "seconds": 20.0,
        "cpu_s": 30.0,
        "batches": 20,
        "edges": [0.1, 0.2],
        "counts": [10, 0, 30],
    } == torchrl_served.window(first, last, (0.1, 0.2))


def test_rllibs_episodes_are_joined_from_their_pieces(
    tmp_path: Path,
) -> None:
    class Piece:
        def __init__(self, value: float) -> None:
            self.value = value

        def get_return(self) -> float:
            return self.value

    noted = tmp_path / "returns"
    rllib_algorithms.note_return(
        noted, episode=Piece(10.0), prev_episode_chunks=[Piece(200.0), Piece(250.0)], env_index=0
    )
    rllib_algorithms.note_return(noted, episode=Piece(12.0), metrics_logger=None)
    assert "460.0\n12.0\n" == noted.read_text(encoding="utf-8")


def test_rllibs_lag_is_found_at_any_depth() -> None:
    found = {
        "a": {"diff_num_grad_updates_vs_sampler_policy": 2, "loss": 0.5},
        "diff_num_grad_updates": 1.0,
    }
    assert [1.0, 2.0] == sorted(rllib_algorithms.numbers(found, rllib_algorithms.LAG))


@pytest.mark.parametrize("script", [factory_appo, rllib_algorithms])
def test_a_peers_own_network_can_be_replaced_by_that_of_the_others(script: Any) -> None:
    own, same = (
        script.settings_of(CARTPOLE),
        script.settings_of(Task("cartpole", 1, 475.0, 60.0, 0.0, {"network": "64-64"})),
    )
    assert own == script.CARTPOLE
    changed = {name: same[name] for name in same if same[name] != own.get(name)}
    assert changed in (
        {"encoder_mlp_layers": (64, 64), "nonlinearity": "tanh"},
        {"model": rllib_algorithms.SAME_NETWORK},
    )


def test_sample_factory_gets_several_values_in_the_form_of_its_parser() -> None:
    assert ["--env=CartPole-v1", "--encoder_mlp_layers", "64", "64"] == factory_appo.command_line(
        {"env": "CartPole-v1", "encoder_mlp_layers": (64, 64)}
    )


def test_one_pass_over_pong_is_an_option_of_sample_factory() -> None:
    assert factory_appo.PONG == factory_appo.settings_of(Task("pong", 1, None, 60.0, 0.0, {}))
    assert (
        1
        == factory_appo.settings_of(Task("pong", 1, None, 60.0, 0.0, {"epochs": "1"}))["num_epochs"]
    )


def test_sample_factorys_frames_are_converted_to_environment_steps() -> None:
    assert {"cartpole": 1, "pong": 4} == factory_appo.FRAME_SKIP


# Environments of peers
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(install.PLACE, str(tmp_path / "peers"))
    return tmp_path / "peers"


class Shell:
    """Records commands. The environments that it makes call this interpreter."""

    def __init__(self, failing: str = "") -> None:
        self.commands: list[list[str]] = []
        self.environments: list[Any] = []
        self._failing = failing

    def __call__(self, command: list[str], *, check: bool, env: Any = None) -> None:
        assert check
        self.commands.append(command)
        self.environments.append(env)
        if self._failing and self._failing in command:
            raise subprocess.CalledProcessError(1, command)
        if command[1:3] == ["-m", "venv"]:
            python = Path(command[3]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
            python.chmod(0o755)


def test_a_peer_is_installed_once_and_again_when_the_plan_changes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, peer = Shell(), install.PEERS["cleanrl"]
    assert install.install(peer, shell)
    assert not install.install(peer, shell)
    assert 2 == len(shell.commands)
    assert {"torch==2.13.0", *peer.packages} <= set(shell.commands[1])
    monkeypatch.setattr(install, "COMMON", ("torch==9.9.9",))
    assert install.install(peer, shell)
    assert "torch==9.9.9" in shell.commands[3]


def test_a_failed_installation_does_not_count_as_installed(place: Path) -> None:
    peer = install.PEERS["cleanrl"]
    with pytest.raises(subprocess.CalledProcessError):
        install.install(peer, Shell(failing="pip"))
    assert install.install(peer, Shell())


def test_an_environment_without_its_interpreter_is_made_again(place: Path) -> None:
    peer = install.PEERS["cleanrl"]
    install.install(peer, Shell())
    install.interpreter("cleanrl").unlink()
    assert install.install(peer, Shell())


def test_constraints_of_the_machine_do_not_apply_to_a_peer(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", "/somewhere/constraints.txt")
    monkeypatch.setenv("PIP_INDEX_URL", "as-it-is-set")
    shell = Shell()
    install.install(install.PEERS["rllib"], shell)
    environment = shell.environments[-1]
    assert (str(place / "rllib" / "constraints.txt"), "as-it-is-set") == (
        environment["PIP_CONSTRAINT"],
        environment["PIP_INDEX_URL"],
    )
    lines = Path(environment["PIP_CONSTRAINT"]).read_text(encoding="utf-8").splitlines()
    assert {"torch==2.13.0", "ray==2.60.0"} <= set(lines)
    assert "ray[rllib]==2.60.0" in shell.commands[-1]


def test_a_peer_without_wheels_is_built_with_its_build_packages_and_undefined_names(
    place: Path,
) -> None:
    shell, peer = Shell(), install.PEERS["pufferlib"]
    assert peer.build is not None
    packages = place / peer.name / "lib" / "python3" / "site-packages"
    run = lambda command, **options: (  # noqa: E731
        shell(command, **options),
        packages.mkdir(parents=True, exist_ok=True),
    )
    assert install.install(peer, run)
    first, second = shell.commands[1:]
    assert {*install.COMMON, *peer.build.needs} <= set(first)
    assert {"--no-build-isolation", *peer.packages} <= set(second)
    assert ("1", None) == (shell.environments[2]["NO_OCEAN"], shell.environments[1].get("NO_OCEAN"))
    answer = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import site; site.addsitedir({str(packages)!r}); print(c_extension_paths)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "[]" == answer.stdout.strip()
    assert not install.install(peer, run)


PUFFERLIB = {
    "pufferlib-3.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pufferlib\nVersion: "
    "3.0.0\n",
    "pufferlib/config/default.ini": "[train]\nseed = 42\noptimizer = muon\nbptt_horizon = "
    "64\nadam_eps = 1e-12\n",
    "pufferlib/__init__.py": "import pathlib\npathlib.Path('resources').touch()\n",
    "pufferlib/models.py": "def Default(environment, hidden_size): return environment\n",
    "pufferlib/vector.py": """
from types import SimpleNamespace
Serial = None
def make(environment, **options): return SimpleNamespace(driver_env=None, close=lambda: None)
""",
    "pufferlib/pufferl.py": """
from types import SimpleNamespace
class PuffeRL:
    def __init__(self, settings, environments, policy):
        self.settings, self.stats, self.global_step, self.utilization = settings, {}, 0, SimpleNamespace(stop=lambda: None)
    def evaluate(self): self.stats["episode_return"] = [float(self.settings["bptt_horizon"])]
    def train(self): self.global_step += 10
""",
}
"""The part of PufferLib that its script calls. Like the real one, its import leaves a file."""


@pytest.mark.e2e
def test_pufferlib_gets_its_defaults_and_its_leftovers_are_removed(tmp_path: Path) -> None:
    for name, text in PUFFERLIB.items():
        path = tmp_path / "installed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    command = [
        sys.executable,
        "-m",
        "benchmarks.peers.puffer_ppo",
        "cartpole",
        "--seed",
        "7",
        "--seconds",
        "0",
        "horizon=32",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(machine.ROOT), str(tmp_path / "installed"))),
    }
    answer = json.loads(
        subprocess.run(
            command, cwd=here, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    )
    assert [] == list(here.iterdir())
    assert (10, 32.0) == (answer["env_steps"], answer["mean_return"])
    settings = {
        name: answer["settings"][name]
        for name in ("seed", "optimizer", "bptt_horizon", "adam_eps", "device")
    }
    assert {
        "seed": 7,
        "optimizer": "muon",
        "bptt_horizon": 32,
        "adam_eps": 1e-12,
        "device": "cpu",
    } == settings


def test_a_python_version_without_packages_of_a_peer_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 13, 0))
    with pytest.raises(RuntimeError, match=r"later than 3\.12"):
        install.install(install.PEERS["sample_factory"], Shell())


def test_a_failed_installation_does_not_stop_the_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def attempt(peer: install.Peer) -> bool:
        tried.append(peer.name)
        if peer.name == "sb3":
            raise subprocess.CalledProcessError(1, "pip")
        return True

    monkeypatch.setattr(install, "install", attempt)
    assert 1 == install.main([])
    assert list(install.PEERS) == tried
    assert 0 == install.main(["torchrl"])


def test_the_error_for_an_unknown_peer_lists_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        install.main(["tianji"])
    assert (
        "expected sb3, sbx, sample_factory, rllib, cleanrl, pufferlib, torchrl"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("peer", install.PEERS.values())
def test_every_version_is_pinned(peer: install.Peer) -> None:
    needs = () if peer.build is None else peer.build.needs
    assert all("==" in package for package in (*install.COMMON, *peer.packages, *needs))
    assert any(package.split("==")[0].split("[")[0] == peer.package for package in peer.packages)


def test_versions_are_those_of_the_peers_environment(place: Path) -> None:
    peer = install.PEERS["cleanrl"]
    assert {} == install.versions(peer)
    install.install(peer, Shell())
    assert {"gymnasium", "numpy", "torch"} <= set(install.versions(peer))
    absent = install.Peer("cleanrl", "no-such-package", ("no-such-package==1", "numpy==2"))
    assert {} == install.versions(absent)


# Rows
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of the given text that a child can run, and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / "some_child.py").write_text(text, encoding="utf-8")
        return "some_child"

    return write


def test_a_child_gets_its_interpreter_and_its_threads(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    python = tmp_path / "another-python"
    python.symlink_to(sys.executable)
    name = module(
        "import json, os, sys; print(json.dumps({'python': sys.orig_argv[0], 'threads': "
        "os.environ.get('OMP_NUM_THREADS')}))"
    )
    assert {"python": sys.executable, "threads": "1"} == child.run(name, timeout_s=30.0).answer
    assert {"python": str(python), "threads": "2"} == child.run(
        name, timeout_s=30.0, python=python, threads=2
    ).answer
    assert child.run(name, timeout_s=30.0, threads=None).answer["threads"] is None


def is_gone(pid: int, within_s: float = 20.0) -> bool:
    """True once the process has ended, or is a zombie that its parent has not reaped yet."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            )
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_grandchild_in_a_group_of_its_own_does_not_outlive_the_child(
    module: Callable[[str], str],
) -> None:
    text = """
import subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(started.pid, flush=True)
time.sleep(600)
"""
    process = child._start(module(text), ())
    with child._ended(process):
        assert process.stdout is not None
        started = int(process.stdout.readline())
        assert not is_gone(started, within_s=0.05)
    assert is_gone(started)


def test_a_timeout_of_a_child_has_an_error_class_of_its_own(
    module: Callable[[str], str],
) -> None:
    with pytest.raises(child.ChildTimeoutError, match="took longer than 1 s"):
        child.run(module("import time; time.sleep(600)"), timeout_s=0.6)


ANSWER = {
    "time_to_target_s": 9.0,
    "start_to_target_s": 11.0,
    "steps_to_target": 90,
    "env_steps_per_s": 10.0,
    "mean_return": 476.0,
    "lag_mean": None,
    "lag_max": None,
}


@pytest.fixture
def installed(place: Path) -> None:
    install.install(install.PEERS["cleanrl"], Shell())


def test_a_peers_answer_becomes_the_values_of_its_row(
    installed: None, module: Callable[[str], str]
) -> None:
    module(f"import json, sys; print(json.dumps({ANSWER!r} | {{'steps_to_target': sys.argv[1:]}}))")
    values = comparison.attempt(RIVAL, ("--seed", 4, "cartpole", "--target", 475.0), 20.0)
    assert {
        "time_to_target": 9.0,
        "start_to_target": 11.0,
        "env_steps_per_s": 10.0,
        "return": 476.0,
    }.items() <= values.items()
    assert ["--seed", "4", "cartpole", "--target", "475.0", "--seconds", "20.0"] == values[
        "steps_to_target"
    ]
    assert {"whole_process", "cores"} <= set(values)
    assert "lag_mean" not in values


def test_a_run_without_a_target_has_no_values_of_a_target(
    installed: None, module: Callable[[str], str]
) -> None:
    module(f"import json; print(json.dumps({ANSWER!r}))")
    assert not {"time_to_target", "start_to_target", "steps_to_target"} & set(
        comparison.attempt(RIVAL, (), 20.0)
    )


def test_lag_is_in_the_row_of_a_peer_that_reports_it() -> None:
    values = comparison.values_of(
        child.Finished(ANSWER | {"lag_mean": 1.5, "lag_max": 4.0}, 10.0, 15.0, 100.0)
    )
    assert {
        "lag_mean": 1.5,
        "lag_max": 4.0,
        "cores": 1.5,
        "peak_pss": 100.0,
    }.items() <= values.items()


def test_the_window_of_a_peer_with_a_server_is_in_its_row() -> None:
    window = {
        "seconds": 20.0,
        "cpu_s": 30.0,
        "batches": 25,
        "edges": [0.1, 0.2],
        "counts": [50, 50, 0],
    }
    values = comparison.values_of(child.Finished(ANSWER | {"window": window}, 10.0, 8.0, 100.0))
    assert {
        "cores": 1.5,
        "batch_requests": 4.0,
        "wait_p50": 0.1,
        "wait_p99": pytest.approx(0.198),
        "peak_pss": 100.0,
    }.items() <= values.items()


def test_our_row_with_a_server_has_the_cores_of_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {
        "trained_per_s": 500.0,
        "return": None,
        "staleness_mean": 1.0,
        "staleness_max": 2.0,
        "cores_learner": 0.75,
        "cores_inference": 0.5,
        "wait_p50": 0.01,
        "wait_p99": 0.03,
        "batch_requests": 1.0,
    }
    monkeypatch.setattr(
        child, "run", lambda *_, **__: child.Finished(dict(answer), 10.0, 18.0, 300.0)
    )
    plan = Plan(quick=True, rounds=1, scratch=tmp_path)
    measured = (Path("some.toml"), (), plan, comparison.training.Window(1.0, 2.0))
    values = comparison.ours_served(*measured)
    assert {
        "env_steps_per_s": 500.0,
        "cores": 1.25,
        "wait_p50": 0.01,
        "wait_p99": 0.03,
        "batch_requests": 1.0,
        "peak_pss": 300.0,
    }.items() <= values.items()
    assert 1.8 == comparison.ours_sustained(*measured)["cores"]
    del answer["wait_p50"], answer["wait_p99"], answer["batch_requests"]
    assert not set(comparison.OF_SERVERS) & set(comparison.ours_served(*measured))


def test_a_peer_that_hangs_is_a_missing_sample(
    installed: None, module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "GRACE_S", 0.5)
    module("import time; time.sleep(600)")
    values = comparison.attempt(RIVAL, ("--target", 475.0), 0.5)
    assert (None, None, 1.0) == (
        values["time_to_target"],
        values["env_steps_per_s"],
        values["hung"],
    )


def test_a_peer_that_starts_slowly_is_not_reported_as_hung(
    installed: None, module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "GRACE_S", 0.0)
    module(f"import json; print(json.dumps({ANSWER!r}))")
    slow = dataclasses.replace(RIVAL, start_s=30.0)
    assert 10.0 == comparison.attempt(slow, (), 0.0)["env_steps_per_s"]
    assert 1.0 == comparison.attempt(RIVAL, (), 0.0)["hung"]


def test_a_failed_peer_is_not_reported_as_slow(
    installed: None, module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    module("raise SystemExit('no such luck')")
    values = comparison.attempt(RIVAL, ("--target", 475.0), 5.0)
    assert (None, 1.0) == (values["time_to_target"], values["failed"])
    assert "hung" not in values
    assert "no such luck" in capsys.readouterr().err


def row(table: str, side: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith(f"| {side}")
    ]


def test_a_peer_that_is_not_installed_is_a_row_that_says_so(place: Path, tmp_path: Path) -> None:
    plan = Plan(quick=True, rounds=2, scratch=tmp_path)
    made = peers_cartpole.make(plan)
    theirs = tuple(side for side in made.sides if side.name == "TorchRL PPO")
    outcome = alternate(
        type(made)(
            name="x", title="x", sides=theirs, ratios=(), units=made.units, settings=made.settings
        ),
        2,
        patience_s=0.0,
        log=str,
    )
    found = results.document(
        outcome, machine=machine.describe(), began="2030-01-01T00:00:00+00:00", quick=True
    )
    results.check(found)
    assert [
        ["TorchRL PPO", "not installed [make bench-peers installs it]", "–", "–", "0 of 2"]
    ] == row(results.table(found), "TorchRL PPO")
    assert (
        "TorchRL PPO = RL Zoo's settings, 8 environments, 1 process, 64-64 tanh (not installed)"
        in results.table(found)
    )


def test_a_ratio_with_a_peer_that_is_not_installed_is_missing(place: Path, tmp_path: Path) -> None:
    for made in (
        module.make(Plan(quick=True, rounds=1, scratch=tmp_path))
        for module in (peers_cartpole, peers_pong)
    ):
        values: dict[str, Any] = {
            side.name: {"time_to_target": 2.0, "env_steps_per_s": 2.0}
            if "tianflow" in side.name
            else side.measure(0)
            for side in made.sides
        }
        beside = [
            ratio for ratio in made.ratios if "bf16" not in ratio.name
        ]  # the bf16 ratios compare two rows of tianflow
        assert {None} == {ratio.of(values) for ratio in beside}
        values = {
            side.name: {
                "time_to_target": 2.0 if "tianflow" in side.name else 6.0,
                "env_steps_per_s": 3.0,
            }
            for side in made.sides
        }
        of_time = {ratio.name for ratio in beside if "time to target" in ratio.name}
        assert bool(of_time) == (made.name == "peers_cartpole")
        assert all((3.0 if ratio.name in of_time else 1.0) == ratio.of(values) for ratio in beside)


def test_central_inference_is_compared_with_torchrls(place: Path, tmp_path: Path) -> None:
    made = peers_served.make(Plan(quick=True, rounds=1, scratch=tmp_path))
    ours: dict[str, Any] = {
        peers_served.CENTRAL: {"env_steps_per_s": 1_000.0, "cores": 1.5},
        peers_served.LOCAL: {"env_steps_per_s": 800.0, "cores": 2.0},
    }
    ours = {name: peers_served.with_cost_of_a_step(values) for name, values in ours.items()}
    absent = {
        side.name: side.measure(0)
        for side in made.sides
        if isinstance(side, Side) and side.name not in ours
    }
    assert {name: {comparison.NOT_INSTALLED: None} for name in absent} == absent
    assert [*[None] * 6, 1.25] == [ratio.of(ours | absent) for ratio in made.ratios]
    theirs = {
        peers_served.SERVED: {"env_steps_per_s": 250.0, "cores": 1.0},
        peers_served.COLLECTED: {"env_steps_per_s": 500.0, "cores": 2.0},
        peers_served.VECTOR: {"env_steps_per_s": 400.0, "cores": 1.2},
        peers_served.VECTOR_COLLECTED: {"env_steps_per_s": 2_000.0, "cores": 2.0},
    }
    theirs = {name: peers_served.with_cost_of_a_step(values) for name, values in theirs.items()}
    assert 4.0 == theirs[peers_served.SERVED]["cpu_per_step"]
    assert pytest.approx([4.0, 2.0, 2.5, 0.5, 4.0 / 1.5, 2.0, 1.25]) == [
        ratio.of(ours | theirs) for ratio in made.ratios
    ]


def test_a_failed_row_has_no_cost_of_a_step() -> None:
    failed: dict[str, float | None] = {"env_steps_per_s": None, "failed": 1.0}
    assert failed == peers_served.with_cost_of_a_step(failed)
    assert "cpu_per_step" not in peers_served.with_cost_of_a_step({**failed, "cores": 2.0})


def test_both_sides_of_central_inference_have_the_same_job() -> None:
    for name, where in ((peers_served.CENTRAL, "central"), (peers_served.LOCAL, "local")):
        case = peers_served.CASES[name]
        config = load_config(comparison.training.CONFIGS / case.config, case.overrides)
        assert (84, 84, "nature_cnn", where) == (
            config.env.kwargs["img_height"],
            config.env.kwargs["img_width"],
            config.network.name,
            config.actors.inference,
        )
        assert torchrl_served.SETTINGS["frames_per_batch"] == (
            config.env.num_envs * config.actors.rollout_steps * config.algorithm.batch_trajectories
        )
    for rival in peers_served.RIVALS:
        options = dict(option.split("=", 1) for option in rival.options)
        assert LATENCY_BUCKETS == tuple(map(float, options["edges"].split(",")))
        assert ("none" == options.get("learner")) == rival.name.endswith("collecting only")
        settings = torchrl_served.settings_of(Task("pong", 1, None, 60.0, 0.0, options))
        assert ("vector" in rival.name) == bool(settings["vector"])
        games = max(1, settings["vector"])
        assert 0 == torchrl_served.SETTINGS["frames_per_batch"] % (settings["chunk"] * games)
    central = peers_served.CASES[peers_served.CENTRAL]
    config = load_config(comparison.training.CONFIGS / central.config, central.overrides)
    assert peers_served.GAMES == (
        f"envs={config.actors.count}",
        f"vector={config.env.num_envs}",
    )


def test_the_sustained_rate_is_compared_with_the_quicker_of_the_installed_peers() -> None:
    first, second = (rival.name for rival in peers_cartpole.FASTEST)
    values: dict[str, dict[str, float | None]] = {
        peers_cartpole.SUSTAINED: {"env_steps_per_s": 60.0}
    }
    for ours, theirs in ((10.0, 20.0), (20.0, 10.0), (20.0, None)):
        values |= {first: {"env_steps_per_s": ours}, second: {"env_steps_per_s": theirs}}
        assert 3.0 == peers_cartpole.over_the_quicker(values)
    assert peers_cartpole.over_the_quicker({**values, first: {}}) is None


def value(
    side: str,
    name: str,
    figures: tuple[float | None, float | None, float | None],
    count: int,
    asked: int,
) -> dict[str, Any]:
    median, low, high = figures
    more = {"median": median, "low": low, "high": high, "count": count, "asked": asked}
    return {"side": side, "name": name, "unit": "", "warm_up": False, **more}


def test_the_short_table_has_a_line_for_each_side_and_counts_missing_samples() -> None:
    values = [
        value("ours", "time_to_target", (2.0, 1.0, 4.0), 3, 3),
        value("ours", "env_steps_per_s", (50_000.0, 40_000.0, 60_000.0), 3, 3),
        value("slow", "time_to_target", (None, 50.0, 50.0), 1, 3),
        value("slow", "env_steps_per_s", (900.0, 800.0, 1_000.0), 3, 3),
        value("never", "time_to_target", (None, None, None), 0, 3),
        value("absent", comparison.NOT_INSTALLED, (None, None, None), 0, 3),
    ]
    head, _, *lines = peers_table.compact({"values": values}).splitlines()
    assert ["side", "time to target, s", "env steps/s"] == [
        cell.strip() for cell in head.strip("|").split("|")
    ]
    assert [
        ["ours", "2 (1 – 4)", "50,000 (40,000 – 60,000)"],
        ["slow", "– (50 – 50), 1 of 3", "900 (800 – 1,000)"],
        ["never", "–", ""],
        ["absent", "not installed", "not installed"],
    ] == [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_short_table_of_missing_results_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1 == peers_table.main([str(tmp_path / "peers_pong.json")])
    assert "make bench-peers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "rival",
    [
        *peers_cartpole.RIVALS,
        *peers_cartpole.FASTEST,
        *peers_pong.RIVALS,
        *peers_served.RIVALS,
    ],
)
def test_every_rival_has_an_environment_and_a_script(rival: Rival) -> None:
    assert rival.peer in install.PEERS
    assert (machine.ROOT / f"{rival.module.replace('.', '/')}.py").exists()


@pytest.mark.parametrize("suite", [peers_pong, peers_served])
def test_the_error_without_atari_names_the_package_to_install(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"pip install -e '\.\[bench\]'"):
        suite.make(Plan(quick=True, rounds=1, scratch=tmp_path))


@pytest.mark.parametrize(
    ("name", "passes"),
    [(peers_pong.ONE_PASS, 1), (peers_pong.FOUR_PASSES, 4), (peers_pong.IMPALA, 1)],
)
def test_our_rows_of_pong_have_the_games_shape_and_the_passes_that_they_say(
    name: str, passes: int
) -> None:
    file, overrides = peers_pong.CONFIGS[name]
    config = load_config(comparison.training.CONFIGS / file, overrides)
    assert (84, 84, "nature_cnn") == (
        config.env.kwargs["img_height"],
        config.env.kwargs["img_width"],
        config.network.name,
    )
    assert passes == getattr(config.algorithm, "epochs", 1)
    assert f"{passes} pass" in name


# The command line
# --------------------------------------------------------------------------------------------------


def test_cores_are_numbers_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 7})
    assert {2, 7} == command_line.arguments(["--cores", "2,7", "peers_pong"]).cores
    assert command_line.arguments(["peers_pong"]).cores is None
    with pytest.raises(SystemExit):
        command_line.arguments(["--cores", "0,2", "peers_pong"])
    assert "expected 2, 3, 7" in capsys.readouterr().err


def test_benchmarks_with_peers_run_only_when_they_are_named() -> None:
    assert not [name for name in command_line.arguments([]).names if name.startswith("peers_")]
    assert {"peers_cartpole", "peers_pong", "peers_served"} <= set(command_line.LONG)


def test_seconds_limit_each_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def make(plan: Plan) -> None:
        plans.append(plan)
        raise BenchmarkError("that is enough")

    monkeypatch.setattr(peers_cartpole, "make", make)
    with pytest.raises(BenchmarkError, match="enough"):
        command_line.run(
            "peers_cartpole",
            command_line.arguments(["--seconds", "33", "peers_cartpole"]),
            tmp_path,
        )
    monkeypatch.undo()
    assert 33.0 == peers_cartpole.make(plans[0]).settings["seconds of training at most"]
    for suite in (peers_pong, peers_served):
        assert "23 s after 10 s of training" == suite.make(plans[0]).settings["window"]


def test_the_target_rule_uses_a_hundred_episodes() -> None:
    assert 100 == common.EPISODES
