from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import tianflow.cli
from tests.support.paths import ROOT
from tianflow import __main__
from tianflow.cli import main as cli
from tianflow.cli.common import complete_config, complete_config_or_algorithm, complete_run
from tianflow.config.loading import load_config, settings_in_force, with_changes, write_config
from tianflow.core.payloads import Version
from tianflow.errors import CheckpointError, RequestError, RunError, StateConflictError
from tianflow.logs import configure
from tianflow.observability.sinks import outlet
from tianflow.rundir.checkpoints import CheckpointStore, write_state
from tianflow.server.common import client


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


class Api(ModuleType):
    """Stands in for the module that trains, and records its calls."""

    def __init__(self) -> None:
        super().__init__("tianflow.cli.train")
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.code = 0
        self.error: Exception | None = None

    def run(self, config: object, **options: object) -> int:
        return self._answer(config, options)

    def _answer(self, config: object, options: dict[str, Any]) -> int:
        self.calls.append((config, options))
        if self.error is not None:
            raise self.error
        return self.code


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    module = Api()
    monkeypatch.setitem(sys.modules, "tianflow.cli.train", module)
    monkeypatch.setattr(tianflow.cli, "train", module, raising=False)
    return module


# train and eval
# --------------------------------------------------------------------------------------------------


def test_train_passes_on_the_config_and_its_options(api: Api, tmp_path: Path) -> None:
    done = run(
        "train",
        "cartpole_ppo",
        "run.seed=7",
        "--plain",
        "--json",
        "--require-target",
        "--no-http",
        "--runs-dir",
        str(tmp_path),
    )
    options = {
        "resume": None,
        "runs_dir": tmp_path,
        "http": False,
        "plain": True,
        "json_line": True,
        "require_target": True,
        "until_eof": False,
    }
    assert (0, [(load_config("cartpole_ppo", ["run.seed=7"]), options)]) == (
        done.exit_code,
        api.calls,
    )


def test_an_algorithm_and_an_environment_are_a_run_and_the_origin_of_its_settings_is_one_line(
    api: Api,
) -> None:
    done = run("train", "ppo", "--env", "CartPole-v1", "run.seed=7")
    origin = "preset cartpole_ppo"
    config = load_config("cartpole_ppo", {"run.seed": 7, "run.preset": origin})
    assert (0, [config]) == (done.exit_code, [call[0] for call in api.calls])
    assert f"settings: {origin}\n" == done.stderr


def test_validate_and_config_show_take_what_train_takes() -> None:
    arguments = ("ppo", "--env", "CartPole-v1", "env.num_envs=16")
    shown = run("config", "show", *arguments)
    config = load_config(tomllib.loads(shown.stdout))
    assert (16, "preset cartpole_ppo") == (config.env.num_envs, config.run.preset)
    assert "16 x CartPole-v1" in run("validate", *arguments).stdout
    assert "settings: preset cartpole_ppo\n" == shown.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ppo"], "ppo: is an algorithm, and needs an environment; accepted: ppo --env ID"),
        (
            ["a.b:C"],
            "is not a config, and as an algorithm it needs an environment; accepted: a.b:C --env",
        ),
        (["--env", "CartPole-v1"], "needs an algorithm"),
        (["ppo", "--env", "CartPole-v1", "--resume", "demo"], "starts a new run"),
        (["cartpole_ppo", "--env", "Acrobot-v1"], "the override env.id=Acrobot-v1"),
        (["ppu", "--env", "CartPole-v1"], "did you mean 'ppo'?"),
        (["ppo", "--env", "NoSuch-v1"], "env.id = 'NoSuch-v1'"),
        (["ppo", "--env", "CartPole-v1", "env.id=Acrobot-v1"], "contradicts 'CartPole-v1'"),
        (["ppo", "--env", "CartPole-v1", "actors=4"], "did you mean 'actors.count'?"),
    ],
)
def test_a_wrong_pair_of_algorithm_and_environment_is_refused_with_the_right_form(
    api: Api, arguments: list[str], said: str
) -> None:
    done = run("train", *arguments)
    assert (2, []) == (done.exit_code, api.calls)
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "served"), [([], True), (["--no-http"], False), (["http.enabled=false"], False)]
)
def test_control_is_served_unless_config_or_flag_disable_it(
    api: Api, arguments: list[str], served: bool
) -> None:
    run("train", "cartpole_ppo", *arguments)
    assert served == api.calls[0][1]["http"]


def test_the_costs_of_a_config_are_shown_before_training(api: Api) -> None:
    assert run("train", "cartpole_ppo", "actors.count=4").stderr.startswith(
        "note: with A = 4 actors"
    )
    assert "" == run("train", "cartpole_ppo").stderr


@pytest.mark.parametrize("code", [0, 1, 130, 143])
def test_the_exit_code_of_training_is_that_of_the_command(api: Api, code: int) -> None:
    api.code = code
    assert code == run("train", "cartpole_ppo").exit_code


def test_a_failed_run_ends_with_its_first_error(api: Api) -> None:
    api.error = RunError("actor-3", "the environment raised", "Traceback ...\nValueError: first\n")
    done = run("train", "cartpole_ppo")
    assert (1, ["Traceback ...", "ValueError: first", "actor-3: the environment raised"]) == (
        done.exit_code,
        done.stderr.splitlines(),
    )


@pytest.mark.parametrize(
    ("error", "code"), [(CheckpointError("torn"), 2), (StateConflictError("has ended"), 1)]
)
def test_expected_errors_are_one_line_and_a_code(api: Api, error: Exception, code: int) -> None:
    api.error = error
    done = run("train", "cartpole_ppo")
    assert (code, f"{error}\n", "") == (done.exit_code, done.stderr, done.stdout)


REFUSED: list[tuple[OSError, str]] = [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device\n"),
    (PermissionError(errno.EACCES, "Permission denied", "runs/a"), "'runs/a': Permission denied\n"),
    (OSError(errno.EROFS, "Read-only file system", "runs/a"), "'runs/a': Read-only file system\n"),
]


@pytest.mark.parametrize(("error", "line"), REFUSED)
def test_a_refusal_of_the_system_is_one_line(api: Api, error: OSError, line: str) -> None:
    api.error = error
    done = run("train", "cartpole_ppo")
    assert (1, line, "") == (done.exit_code, done.stderr, done.stdout)


@pytest.mark.parametrize(
    "command", [["report"], ["status"], ["diagnose"], ["eval"], ["train", "--resume"]]
)
def test_a_name_that_is_too_long_is_one_line(tmp_path: Path, command: list[str]) -> None:
    done = run(*command, "x" * 300, "--runs-dir", str(tmp_path))
    assert (1, 1) == (done.exit_code, len(done.stderr.splitlines()))
    assert "File name too long" in done.stderr


def test_every_problem_of_a_config_is_one_line_and_nothing_is_started(api: Api) -> None:
    done = run("train", "cartpole_ppo", "env.num_env=3", "actors.count=-1")
    assert (2, []) == (done.exit_code, api.calls)
    first, second = done.stderr.splitlines()
    assert first.startswith("env.num_env = 3: is not a setting; accepted: one of failure_window_s")
    assert first.endswith("did you mean 'num_envs'?")
    assert "actors.count = -1: is out of range; accepted: a number >= 0" == second


def saved_run(folder: Path) -> Path:
    """A run with seed 5, whose bound was 1 at the start, 3 at the checkpoint and 4 at the end."""
    (folder / "a-run" / "checkpoints").mkdir(parents=True)
    config = load_config("cartpole_ppo", ["run.seed=5"])
    write_config(folder / "a-run", with_changes(config, {"balance": {"max_staleness": 4}}))
    config = with_changes(config, {"balance": {"max_staleness": 3}})
    store = CheckpointStore(folder / "a-run" / "checkpoints", keep=1)
    staged = store.stage()
    state = write_state(staged, {"x": np.zeros(1, np.float32)})
    manifest = {
        "config": json.loads(config.model_dump_json()),
        "env_steps": 640,
        "samples": 640,
        "episodes": 3,
        "elapsed_s": 8.0,
        "trained_s": 4.0,
    }
    return store.publish(staged, version=Version(1, 10), state=state, manifest=manifest)


def test_a_resumed_run_needs_no_config(api: Api, tmp_path: Path) -> None:
    checkpoint = saved_run(tmp_path)
    for name in ("a-run", str(checkpoint), str(tmp_path / "a-run")):
        assert 0 == run("train", "--resume", name, "--runs-dir", str(tmp_path)).exit_code
    assert [5, 5, 5] == [config.run.seed for config, _ in api.calls]


def test_a_resumed_run_keeps_its_changed_settings(api: Api, tmp_path: Path) -> None:
    """A run continues with its last settings, a checkpoint with the settings it was written with."""
    checkpoint = saved_run(tmp_path)
    for name in ("a-run", str(tmp_path / "a-run"), str(checkpoint)):
        run("train", "--resume", name, "--runs-dir", str(tmp_path))
    assert [4, 4, 3] == [config.bound for config, _ in api.calls]


def test_a_run_without_its_config_continues_with_that_of_its_checkpoint(
    api: Api, tmp_path: Path
) -> None:
    saved_run(tmp_path)
    (tmp_path / "a-run" / "config.toml").unlink()
    run("train", "--resume", "a-run", "--runs-dir", str(tmp_path))
    assert 3 == api.calls[0][0].bound


@pytest.mark.parametrize(
    "text", [b"", b'[env]\nid = "CartPo', b"\xff\xfe", b"a = " + b"[" * 100_000]
)
def test_a_run_with_a_corrupt_config_continues_with_that_of_its_checkpoint_and_says_so(
    api: Api, tmp_path: Path, text: bytes
) -> None:
    saved_run(tmp_path)
    (tmp_path / "a-run" / "config.toml").write_bytes(text)
    assert 0 == run("train", "--resume", "a-run", "--runs-dir", str(tmp_path)).exit_code
    assert 3 == api.calls[0][0].bound
    configure(stream=(log := io.StringIO()))
    assert settings_in_force("a-run", tmp_path) is None
    assert "those of the checkpoint are used" in log.getvalue()


def test_settings_of_a_resumed_run_can_be_overridden(api: Api, tmp_path: Path) -> None:
    saved_run(tmp_path)
    run(
        "train",
        "balance.max_staleness=9",
        "run.seed=6",
        "--resume",
        "a-run",
        "--runs-dir",
        str(tmp_path),
    )
    config, options = api.calls[0]
    assert (9, 6, "a-run") == (config.bound, config.run.seed, options["resume"])


@pytest.mark.parametrize(
    ("limit", "before"),
    [
        ("run.max_seconds=4", "(4 before)"),
        ("run.max_seconds=5", ""),
        ("run.max_updates=10", "(10 before)"),
    ],
)
@pytest.mark.parametrize("json_line", [False, True])
def test_a_resume_of_a_used_up_limit_says_so_and_starts_nothing(
    api: Api, tmp_path: Path, limit: str, before: str, json_line: bool
) -> None:
    saved_run(tmp_path)
    options = ["--json"] if json_line else []
    done = run("train", limit, "--resume", "a-run", "--runs-dir", str(tmp_path), *options)
    assert (0, 0 if before else 1) == (done.exit_code, len(api.calls))
    assert [1 if before else 0] == [
        done.stderr.count(
            f"note: {limit.replace('=', ' = ')} is used up {before}, so nothing will be trained"
        )
    ]
    reason = limit.removeprefix("run.").partition("=")[0]
    if before and json_line:
        assert ("done", reason, 10) == tuple(
            json.loads(done.stdout)[name] for name in ("state", "reason", "updates")
        )
    elif before:
        assert done.stdout.startswith(f"a-run: done ({reason})")


def test_a_used_up_run_that_missed_its_target_is_no_success_where_a_target_is_required(
    api: Api, tmp_path: Path
) -> None:
    saved_run(tmp_path)
    wish = ("train", "run.max_updates=10", "--resume", "a-run", "--runs-dir", str(tmp_path))
    assert 1 == run(*wish, "--require-target").exit_code
    summary = {"run": "a-run", "updates": 10, "target_reached": True}
    (tmp_path / "a-run" / "summary.json").write_text(json.dumps(summary))
    assert (0, []) == (run(*wish, "--require-target").exit_code, api.calls)


@pytest.mark.parametrize(("revision", "bound"), [(0, 4), (7, 4), (8, 3)])
def test_a_resume_takes_the_newest_settings_of_file_and_checkpoint(
    api: Api, tmp_path: Path, revision: int, bound: int
) -> None:
    """A full disk may have taken a checkpoint, and not the settings before it."""
    checkpoint = saved_run(tmp_path)
    stored = tmp_path / "a-run" / "config.toml"
    stored.write_text(f"# revision 7\n{stored.read_text()}")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "revision": revision}))
    done = run("train", "--resume", "a-run", "--runs-dir", str(tmp_path))
    assert (bound, revision > 7) == (
        api.calls[0][0].bound,
        "is older than the newest checkpoint" in done.stderr,
    )


@pytest.mark.parametrize(
    "arguments",
    [["train"], ["train", "--resume", "nothing"], ["train", "--no-such-flag"], ["no-such-command"]],
)
def test_bad_usage_is_code_2(api: Api, arguments: list[str]) -> None:
    assert (2, []) == (run(*arguments).exit_code, api.calls)


def test_eval_plays_the_given_number_of_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    environment = {"id": "Env-v0", "kwargs": {}, "set": {}, "wrappers": []}
    result = {"episodes": 7, "mean_return": 3.5, "version": 12, "checkpoint": "runs/a-run/v12"}
    result |= {"environment": environment}
    monkeypatch.setattr(
        "tianflow.cli.eval.evaluate_checkpoint",
        lambda *given, **options: calls.append((*given, options)) or result,
    )
    done = run("eval", "a-run", "--episodes", "7")
    said = "mean return 3.50 over 7 episodes\n  version 12, runs/a-run/v12, in Env-v0\n"
    assert (0, said) == (done.exit_code, done.stdout)
    assert result == json.loads(run("eval", "a-run", "--episodes", "7", "--json").stdout)
    assert [
        (
            "a-run",
            {
                "episodes": 7,
                "runs_dir": Path("runs"),
                "video": None,
                "video_episodes": 3,
                "trust": False,
                "overrides": (),
                "evaluation": None,
                "seed": None,
                "sampled": False,
            },
        )
    ] * 2 == calls


# validate and config
# ------------------------------------------------------------------------------------------------


def test_validate_checks_the_packages_of_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "packages_distributions", lambda: {"tests": ["sinks"]})
    done = run("validate", "cartpole_ppo", 'metrics.sinks=["tests.observability.test_sinks:Needy"]')
    assert 2 == done.exit_code
    assert (
        "no_such_package_at_all is not installed; accepted: pip install 'sinks[needy]' first"
        in done.stderr
    )


def test_validate_shows_environment_and_costs() -> None:
    done = run("validate", "cartpole_ppo", "actors.count=4")
    assert 0 == done.exit_code
    assert "environment: 32 x CartPole-v1, observation float32[4]; discrete actions" in done.stdout
    assert "note: with A = 4 actors" in done.stdout
    assert done.stdout.endswith("cartpole_ppo: valid\n")


def test_validate_refuses_what_does_not_fit_the_environment() -> None:
    done = run("validate", "cartpole_ppo", "network.name=nature_cnn")
    assert (2, "") == (done.exit_code, done.stdout)
    assert done.stderr.startswith("network.name = 'nature_cnn'")


def test_the_output_of_config_show_can_be_read_back() -> None:
    config = load_config("cartpole_ppo", ["run.seed=7"])
    for flags in ([], ["--resolved"]):
        assert config == load_config(
            tomllib.loads(run("config", "show", "cartpole_ppo", "run.seed=7", *flags).stdout)
        )


def test_config_show_resolved_prints_the_defaults_too() -> None:
    assert "straggler_patience" in run("config", "show", "cartpole_ppo", "--resolved").stdout
    assert "straggler_patience" not in run("config", "show", "cartpole_ppo").stdout


def test_config_show_resolved_names_every_setting_also_unset_ones() -> None:
    shown = run("config", "show", "cartpole_ppo", "--resolved").stdout
    assert "# credits is not set" in shown
    config = load_config("cartpole_ppo")
    settings = [key for section in config.model_dump().values() for key in section if key != "name"]
    assert [] == [
        key
        for key in settings
        if f"\n{key} = " not in shown and f"\n# {key} is not set" not in shown
    ]


OWN = """
from tests.support.environments import CounterEnv

class MyEnv(CounterEnv):
    pass
"""


@pytest.mark.e2e
def test_a_config_may_name_a_module_of_the_current_directory(
    tmp_path: Path,
) -> None:
    """Python's path holds the directory of a script, not the current directory."""
    (tmp_path / "my_env.py").write_text(OWN)
    (tmp_path / "typer.py").write_text(
        "raise ImportError('a module of that directory shadows an installed one')"
    )
    script = [sys.executable, "-P", "-c", "from tianflow.cli.main import main; main()"]
    root = ROOT
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "controllers"))),
    }
    command = [*script, "validate", "cartpole_ppo", "env.id=my_env:MyEnv"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert "environment: 32 x my_env:MyEnv" in done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_a_command_does_not_need_the_standard_streams(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    """Cron jobs and daemons close them. The descriptors of the event loop would then be standard
    streams, and its library aborts.
    """
    closing = "; ".join(f"os.close({number})" for number in closed)
    restart = "os.execv(sys.executable, [sys.executable, '-m', 'tianflow', 'train', *sys.argv[1:]])"
    config = [
        "cartpole_ppo",
        "placement.launcher=inline",
        "run.max_updates=1",
        "run.target_return=9999",
        "evaluation.episodes=1",
    ]
    command = [
        sys.executable,
        "-c",
        f"import os, sys; {closing}; {restart}",
        *config,
        "run.name=a",
        "--plain",
        "--runs-dir",
        str(tmp_path),
    ]
    root = ROOT
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "controllers"))),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert "done" == json.loads((tmp_path / "a" / "summary.json").read_text())["state"]


@pytest.mark.e2e
def test_a_file_as_standard_input_is_refused_with_until_eof(tmp_path: Path) -> None:
    root = ROOT
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "controllers"))),
    }
    command = [
        sys.executable,
        "-m",
        "tianflow",
        "train",
        "cartpole_ppo",
        "--until-eof",
        "--runs-dir",
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (2, 1) == (done.returncode, len(done.stderr.splitlines())), done.stderr
    assert "--until-eof: standard input is a file" in done.stderr


# Control
# --------------------------------------------------------------------------------------------------


class Running:
    """Active runs, and the requests to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, str, str, object]] = []
        self.answer: dict[str, Any] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        """By path; others get `answer`."""
        self.error: Exception | None = None
        monkeypatch.setattr(client, "running", self.running)
        monkeypatch.setattr(client, "request", self.request)

    @staticmethod
    def running(runs_dir: Path) -> dict[str, Any]:
        return {"one": Contact("one")} if runs_dir == Path("runs") else {}

    def request(
        self,
        contact: Contact,
        method: str,
        path: str = "",
        body: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        self.requests.append((contact.run, method, path, body))
        if self.error is not None:
            raise self.error
        return dict(self.answers.get(path, self.answer))


class Contact:
    def __init__(self, run: str) -> None:
        self.run = run


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    return Running(monkeypatch)


@pytest.mark.parametrize("named", [[], ["one"]])
@pytest.mark.parametrize("action", ["pause", "resume", "drain", "checkpoint", "stop"])
def test_an_action_is_posted_and_prints_the_next_state(
    running: Running, action: str, named: list[str]
) -> None:
    running.answer = {"state": "pausing"}
    assert (
        "one: pausing"
        + (", writes a checkpoint after the current update" if action == "checkpoint" else "")
        + "\n"
        == run(action, *named).stdout
    )
    assert [("one", "POST", f"/{action}", None)] == running.requests


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    [
        (["balance.max_staleness=4"], "/balance", {"max_staleness": 4}),
        (
            ["one", "balance.max_staleness=unbounded", "balance.credits=null"],
            "/balance",
            {"max_staleness": "unbounded", "credits": None},
        ),
        (
            ["one", "algorithm.learning_rate=1e-4", "learner.slowdown=0.5"],
            "/learner",
            {"learning_rate": 1e-4, "slowdown": 0.5},
        ),
        (["balance.parameters.quiet_updates=3"], "/balance", {"parameters": {"quiet_updates": 3}}),
    ],
)
def test_set_changes_one_section_atomically(
    running: Running, arguments: list[str], path: str, body: object
) -> None:
    running.answer = {"generation": "3"}
    done = run("set", *arguments)
    assert (0, [("one", "PATCH", path, body)]) == (done.exit_code, running.requests)
    assert "generation 3" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", "one"],
        ["set", "balance.credits=3", "actors.count=2"],
        ["set", "one", "balance.credits"],
        ["set", "credits=3"],
        ["set", "balance.credits=3", "balance.credits.more=1"],
        ["set", "run.seed=3"],
        ["get", "one", "run"],
        ["get", "one", "balance", "credits"],
        ["get", "balance.credit"],
        ["scale", "one"],
        ["scale", "actors=many"],
        ["scale", "one", "actors=-1"],
    ],
)
def test_invalid_arguments_are_code_2_and_change_nothing(
    running: Running, arguments: list[str]
) -> None:
    done = run(*arguments)
    assert 2 == done.exit_code
    assert done.stderr
    assert "PATCH" not in {method for _, method, _, _ in running.requests}


def test_a_misspelt_setting_is_refused_with_the_nearest_name_also_by_get(
    running: Running,
) -> None:
    running.answer = {"max_staleness": 1, "credits": None}
    assert run("get", "balance.max_stalenes").stderr.endswith(
        "one of credits, max_staleness; did you mean 'max_staleness'?\n"
    )


def test_settings_of_two_sections_are_refused_by_their_names(running: Running) -> None:
    message = run("set", "balance.credits=3", "actors.count=2").stderr
    assert "names several sections (balance and actors)" in message


def test_scale_sets_the_number_of_actors(running: Running) -> None:
    assert 0 == run("scale", "actors=16").exit_code
    assert 0 == run("scale", "one", "actors=0").exit_code
    assert [
        ("one", "PATCH", "/actors", {"count": 16}),
        ("one", "PATCH", "/actors", {"count": 0}),
    ] == running.requests


def test_get_prints_settings_as_they_are_set(running: Running) -> None:
    running.answer = {
        "max_staleness": "unbounded",
        "credits": None,
        "straggler_patience": 10.0,
        "generation": "3",
    }
    assert (
        'max_staleness = "unbounded"\ncredits = null\nstraggler_patience = 10.0\n'
        == run("get", "balance").stdout
    )
    assert "10.0\n" == run("get", "one", "balance.straggler_patience").stdout
    assert "unbounded" == json.loads(run("get", "balance.max_staleness", "--json").stdout)
    assert [("one", "GET", "/balance", None)] * 3 == running.requests


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["one"],
            'algorithm.learning_rate = { schedule = "linear", start = 0.001 }  # now 0.00025',
        ),
        (["learner"], 'learning_rate = { schedule = "linear", start = 0.001 }  # now 0.00025'),
        (
            ["one", "algorithm.learning_rate"],
            '{ schedule = "linear", start = 0.001 }  # now 0.00025',
        ),
    ],
)
def test_get_prints_the_value_in_force_beside_a_schedule(
    running: Running, words: list[str], line: str
) -> None:
    schedule = {"schedule": "linear", "start": 1e-3}
    schedules = {
        "algorithm.learning_rate": {"schedule": schedule, "value": 2.5e-4},
        "algorithm.entropy_cost": {"schedule": schedule, "value": None},
    }
    running.answers = {
        "": {"settings": {"generation": 3, "schedules": schedules}},
        "/learner": {"learning_rate": schedule, "entropy_cost": schedule, "slowdown": 0.0},
    }
    lines = run("get", *words).stdout.splitlines()
    assert line in lines
    assert 1 == sum("now" in text for text in lines), "not before the first update"
    found = json.loads(run("get", *words, "--json").stdout)
    name, _, _ = line.partition(" = {")
    assert schedule == (found if "algorithm.learning_rate" in words else found[name])
    tomllib.loads("\n".join(lines) if len(lines) > 1 else f"x = {lines[0]}")


def test_get_of_an_older_run_prints_schedules_alone(running: Running) -> None:
    running.answers = {"": {"settings": {"generation": 3}}, "/learner": {"slowdown": 1.0}}
    assert "slowdown = 1.0\n" == run("get", "one", "learner").stdout


@pytest.mark.parametrize("named", [[], ["one"]])
def test_get_without_a_section_prints_all_as_they_are_set(
    running: Running, named: list[str]
) -> None:
    running.answer = {"slowdown": 0.0, "learning_rate": 1e-4, "generation": "3"}
    lines = run("get", *named).stdout.splitlines()
    assert {
        "balance.slowdown = 0.0",
        "learner.slowdown = 0.0",
        "algorithm.learning_rate = 0.0001",
    } <= set(lines)
    assert {
        ("one", "GET", f"/{part}", None)
        for part in (
            "actors",
            "balance",
            "env",
            "evaluation",
            "inference",
            "learner",
            "replay",
            "weights",
        )
    } | {("one", "GET", "", None)} == set(running.requests)
    assert 1e-4 == json.loads(run("get", *named, "--json").stdout)["algorithm.learning_rate"]


def test_a_shell_completes_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cartoon.toml").touch()
    (tmp_path / "carts").mkdir()
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert [] == complete_run("")
    (tmp_path / "runs" / "one" / "control.json").touch()
    assert (["one"], []) == (complete_run("o"), complete_run("t"))
    assert [
        "cartpole_a2c",
        "cartpole_apex",
        "cartpole_dqn",
        "cartpole_impala",
        "cartpole_ppo",
        "cartpole_seed",
        "cartoon.toml",
        "carts/",
    ] == complete_config("cart")
    assert ["ppo"] == complete_config_or_algorithm("pp")
    environment = {
        "_TIANFLOW_COMPLETE": "complete_bash",
        "COMP_WORDS": "tianflow pause o",
        "COMP_CWORD": "2",
    }
    assert (
        "one" == CliRunner().invoke(cli.app, prog_name="tianflow", env=environment).stdout.strip()
    )


@pytest.mark.parametrize("line", ["eval", "export", "report", "train --resume"])
def test_a_shell_completes_finished_runs_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "over").mkdir(parents=True)
    (tmp_path / "runs" / "over" / "config.toml").touch()
    for prefix, found in (("o", "over"), ("runs/o", "runs/over"), ("x", "")):
        words = f"tianflow {line} {prefix}"
        environment = {
            "_TIANFLOW_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        assert (
            found
            == CliRunner().invoke(cli.app, prog_name="tianflow", env=environment).stdout.strip()
        )


@pytest.mark.parametrize("command", ["get", "set", "scale"])
def test_a_shell_completes_runs_with_live_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "control.json").touch()
    environment = {
        "_TIANFLOW_COMPLETE": "complete_bash",
        "COMP_WORDS": f"tianflow {command} o",
        "COMP_CWORD": "2",
    }
    assert (
        "one" == CliRunner().invoke(cli.app, prog_name="tianflow", env=environment).stdout.strip()
    )


def test_an_interrupt_while_the_script_is_imported_shows_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "tianflow.cli.main", Slow("tianflow.cli.main"))
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert (130, None) == (caught.value.code, caught.value.__cause__)


def test_the_version_is_printed() -> None:
    assert f"tianflow {tianflow.__version__}\n" == run("--version").stdout


def test_a_refusal_is_printed_on_stderr_with_its_code(running: Running) -> None:
    running.error = RequestError("Invalid settings\nbalance.credits = 1: no", bad=True)
    done = run("set", "balance.credits=1")
    assert (2, "", "Invalid settings\nbalance.credits = 1: no\n") == (
        done.exit_code,
        done.stdout,
        done.stderr,
    )
    running.error = RequestError("State conflict: the run has ended")
    assert 1 == run("pause").exit_code


def test_a_run_that_is_not_active_is_code_1(running: Running) -> None:
    for arguments in (
        ["pause", "two"],
        ["get", "two", "balance"],
        ["status", "two"],
        ["stop", "--runs-dir", "elsewhere"],
    ):
        assert 1 == run(*arguments).exit_code
    assert [] == running.requests


STATUS = {
    "id": "one",
    "state": "running",
    "progress": {"env_steps": 123456, "updates": 60},
    "throughput": {"env_steps_per_s": {"10": 24284.4}},
    "returns": {"mean": 471.25},
    "staleness": {"mean": 0.98, "bound": 1},
    "actors": {"reporting": 2},
    "bottleneck": None,
}


def test_status_shows_every_run_in_a_line(running: Running) -> None:
    running.answer = STATUS
    head, line = run("status").stdout.splitlines()
    assert [
        "run",
        "state",
        "env",
        "steps",
        "updates",
        "steps/s",
        "train",
        "return",
        "best",
        "loss",
        "staleness",
        "bound",
        "actors",
        "bottleneck",
    ] == head.split()
    assert [
        "one",
        "running",
        "123456",
        "60",
        "24284",
        "471.2",
        "-",
        "-",
        "0.98",
        "1",
        "2",
        "-",
    ] == line.split()


def test_status_as_json_is_what_the_run_says(running: Running) -> None:
    running.answer = STATUS
    assert [STATUS] == json.loads(run("status", "--json").stdout)
    assert STATUS == json.loads(run("status", "one", "--json").stdout)


def test_status_without_runs_says_so(running: Running) -> None:
    assert "no active run in 'elsewhere'\n" == run("status", "--runs-dir", "elsewhere").stdout
