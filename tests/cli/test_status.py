"""``tianflow status``, ``top``, ``submit`` and ``delete`` beside a service: what they show, and what
they send.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tianflow.cli import main as cli
from tianflow.cli import status as overview
from tianflow.config.loading import load_config
from tianflow.errors import Problem, RequestError
from tianflow.planning.starting import start_config
from tianflow.rundir.control_file import ControlFile, process_start_time
from tianflow.server.common import client

ENDED = {"state": "done", "ended": 5.0}


def run(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, arguments, input=typed)


SEND = client.send


class Services:
    """What a service and the runs beside it would answer."""

    def __init__(self) -> None:
        self.own = ControlFile(
            run="",
            pid=os.getpid(),
            start_time=process_start_time(os.getpid()),
            address="http://here",
            token="t",
            read_token="r",
        )
        self.there = True
        self.runs: list[dict[str, Any]] = []
        self.going: dict[str, dict[str, Any]] = {}
        self.silent: set[str] = set()
        self.refusal: RequestError | None = None
        self.asked: list[tuple[str, str, str, Any, Mapping[str, str]]] = []

    def service(self, _runs_dir: Path) -> ControlFile | None:
        return self.own if self.there else None

    def running(self, _runs_dir: Path) -> dict[str, ControlFile]:
        return {name: replace(self.own, run=name) for name in self.going}

    def request(self, contact: ControlFile, _method: str) -> dict[str, Any]:
        if contact.run in self.silent:
            raise RequestError(f"run {contact.run!r} does not answer")
        return self.going[contact.run]

    def all_runs(self, _holder: ControlFile) -> list[dict[str, Any]]:
        return self.runs

    def send(
        self,
        contact: ControlFile,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        assert ("" if body is None else "application/json") == content_type
        # a service makes the environment of a submission before it answers
        assert (client.SUBMISSION_S if method == "POST" else None) == timeout_s
        self.asked.append((contact.address + contact.token, method, path, body, headers or {}))
        if self.refusal is not None:
            raise self.refusal
        if method == "DELETE":
            return {"id": path.rpartition("/")[2], "action": "delete", "state": "deleted"}
        return {"id": "a-run", "state": "pending"}


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    made = Services()
    for name in ("service", "running", "request", "all_runs", "send"):
        monkeypatch.setattr(client, name, getattr(made, name))
    return made


NODE = {
    "name": "far",
    "up": True,
    "ready": True,
    "cores": 4,
    "hosts": 2,
    "shards": [],
    "round_trip_s": 0.002,
    "weights_lag": 1,
    "received_bytes": {"trajectories": 2000},
    "sent_bytes": {"weights": 3000},
    "direct_received_bytes": 0,
    "direct_sent_bytes": 0,
}


def test_nodes_shows_replay_shards_and_direct_links_where_there_are_some(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(client, "find", lambda *_: replace(services.own, run="a"))
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(client, "request", lambda *_: {"nodes": found})
    assert "a has no nodes\n" == run("nodes", "a").stdout
    found.append(NODE)
    header, line = run("nodes", "a").stdout.splitlines()
    assert header.split()[-2:] == ["in", "out"]
    assert line.split() == ["far", "ready", "4", "2", "2.0", "ms", "1", "2.0", "kB", "3.0", "kB"]
    store = {"name": "store", "shards": ["replay-0", "replay-1"], "direct_received_bytes": 5000}
    found.append({**NODE, **store})
    header, far, line = run("nodes", "a").stdout.splitlines()
    assert header.endswith("shards  direct in  direct out")
    assert far.split()[-5:] == ["0", "0", "bytes", "0", "bytes"]
    assert line.split()[-5:] == ["2", "5.0", "kB", "0", "bytes"]


def test_status_shows_what_goes_on_what_waits_and_what_ended_lately(services: Services) -> None:
    services.going = {"going": {"id": "going", "state": "running"}}
    services.runs = [
        {"id": "waits", "state": "pending", "ended": None},
        {"id": "going", "state": "running", "ended": None},
    ]
    services.runs += [{"id": f"old-{index}", **ENDED} for index in range(overview.ENDED_SHOWN + 3)]
    lines = run("status").stdout.splitlines()[1:]
    assert ["going", "running"] == lines[0].split()[:2]
    assert ["waits", "pending"] == lines[1].split()[:2]
    assert [f"old-{index}" for index in range(overview.ENDED_SHOWN)] == [
        line.split()[0] for line in lines[2:-1]
    ]
    assert "3 more that do not run (tianflow status --all shows them)" == lines[-1]
    assert "going" in run("top").stdout  # no terminal: once


def test_top_has_curves_of_return_and_loss_and_status_has_numbers() -> None:
    document = {
        "id": "a",
        "returns": {"mean": 8.0},
        "learning": {
            "values": {"train/loss": 0.25},
            "curves": {"return": [9.0] * 16 + [float(n) for n in range(8)], "loss": [2.0, None]},
        },
    }
    plain, curved = (overview.table([document], curves=curves) for curves in (False, True))

    def cell(table: Any, name: str) -> str:
        place = list(overview.COLUMNS).index(name)
        (text,) = table.columns[place].cells
        return str(text)

    assert ("8", "0.25") == (cell(plain, "train return"), cell(plain, "loss"))
    assert ("████▁▂▃▃▄▅▆▆ 8", "▁  0.25") == (cell(curved, "train return"), cell(curved, "loss"))
    assert "-" == cell(overview.table([{"id": "old"}], curves=True), "loss")


def test_status_leaves_out_a_run_that_ends_meanwhile_not_one_that_hangs(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.there, services.going, services.silent = (
        False,
        {"a": {"id": "a", "state": "running"}, "b": {}},
        {"b"},
    )
    done = run("status")
    assert 1 == done.exit_code
    assert "'b' does not answer" in done.stderr
    monkeypatch.setattr(ControlFile, "alive", property(lambda file: file.run != "b"))
    assert ["a"] == [document["id"] for document in json.loads(run("status", "--json").stdout)]


SUMMARY = {
    "state": "done",
    "env_steps": 640,
    "updates": 5,
    "mean_return": 9.5,
    "staleness": {"mean": 0.5, "bound": 1},
    "reason": "max_updates",
}


def left(tmp_path: Path, name: str, **others: Any) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "summary.json").write_text(json.dumps(SUMMARY | others))


def test_what_has_ended_is_shown_with_what_it_reached(services: Services, tmp_path: Path) -> None:
    best = {"version": 4, "mean_return": 11.5, "episodes": 8}
    left(tmp_path, "old")
    left(tmp_path, "new", best=best)
    services.runs = [{"id": name, **ENDED} for name in ("old", "new", "gone")]
    header, old, new, gone = run("status", "--runs-dir", str(tmp_path)).stdout.splitlines()
    numbers = ["640", "5", "-", "9.5"]
    assert ["old", "done", *numbers, "-", "-", "0.5", "1", "-", "-"] == old.split()
    assert ["new", "done", *numbers, "11.5", "-", "0.5", "1", "-", "-"] == new.split()
    assert ["gone", "done", *10 * "-"] == gone.split()
    assert header.split()[0] == "run"


def test_status_of_a_run_that_has_ended_needs_no_service(
    services: Services, tmp_path: Path
) -> None:
    services.there = False
    left(tmp_path, "old")
    assert ["old", "done"] == run("status", "old", "--runs-dir", str(tmp_path)).stdout.splitlines()[
        1
    ].split()[:2]
    assert (
        9.5
        == json.loads(run("status", "old", "--runs-dir", str(tmp_path), "--json").stdout)[
            "summary"
        ]["mean_return"]
    )
    assert (
        "ended: old (tianflow status RUN shows one)"
        in run("status", "--runs-dir", str(tmp_path)).stdout
    )
    (tmp_path / "old" / "summary.json").write_text("torn")
    assert 1 == run("status", "old", "--runs-dir", str(tmp_path)).exit_code


def test_a_run_that_was_broken_off_has_not_ended_whatever_an_earlier_life_left(
    services: Services, tmp_path: Path
) -> None:
    services.there = False
    left(tmp_path, "old")
    left(tmp_path, "killed")
    replace(services.own, run="killed", start_time=1).write(tmp_path / "killed")
    told = run("status", "--runs-dir", str(tmp_path)).stdout
    assert (
        "ended: old (tianflow status RUN shows one); interrupted: killed (tianflow train --resume "
        "RUN continues)\n" in told
    )
    done = run("status", "killed", "--runs-dir", str(tmp_path))
    assert 1 == done.exit_code
    assert "run 'killed' crashed" in done.stderr


def test_why_a_run_failed_stands_below_the_table(services: Services, tmp_path: Path) -> None:
    services.runs = [
        {"id": "bad", "state": "failed", "ended": 5.0, "reasons": ["env.id = 'X': there is none"]},
        {"id": "good", **ENDED},
    ]
    assert ["bad: env.id = 'X': there is none"] == run(
        "status", "--runs-dir", str(tmp_path)
    ).stdout.splitlines()[3:]


def test_a_run_that_is_only_on_disk_is_told_as_such(services: Services, tmp_path: Path) -> None:
    reason = "it is on disk and not in the store of this service"
    found = {"id": "lost", "state": "interrupted", "ended": None, "reasons": [reason]}
    services.runs = [{"id": "good", **ENDED}, {**found, "on_disk": True}]
    lines = run("status", "--runs-dir", str(tmp_path)).stdout.splitlines()
    assert ["lost", "interrupted"] == lines[2].split()[:2]
    assert [f"lost: {reason}"] == lines[3:]
    services.runs = [{**found, "id": name, "on_disk": True} for name in ("one", "two")]
    (line,) = run("status", "--runs-dir", str(tmp_path)).stdout.splitlines()[3:]
    assert line.startswith("2 of these are on disk and not in the store of the service")


def test_the_console_is_that_of_the_service_or_of_the_run_that_is_named(services: Services) -> None:
    services.going = {"one": {}}
    assert "http://here/#token=t\n" == run("console").stdout
    assert "http://here/#token=t&run=one\n" == run("console", "one").stdout
    services.there = False
    assert "http://here/#token=t&run=one\n" == run("console").stdout
    assert 1 == run("console", "two").exit_code


def test_submit_sends_what_the_file_says_unchecked_and_a_key_of_its_own(
    services: Services, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[env]\nid = "only.there:Env"\n')
    for _ in range(2):
        done = run("submit", str(path), "balance.max_staleness=3", "run.name=mine")
        assert (0, "a-run: pending\n") == (done.exit_code, done.stdout)
    (_, method, where, body, first), (_, _, _, _, second) = services.asked
    assert ("POST", "/api/v1/runs") == (method, where)
    assert {
        "config": {"env": {"id": "only.there:Env"}},
        "overrides": {"balance.max_staleness": 3, "run.name": "mine"},
    } == body
    assert first["Idempotency-Key"] != second["Idempotency-Key"]


def test_submit_sends_a_shipped_config_by_name_and_prints_json(services: Services) -> None:
    assert {"id": "a-run", "state": "pending"} == json.loads(
        run("submit", "cartpole_ppo", "--json").stdout
    )
    assert {"config": "cartpole_ppo", "overrides": {}} == services.asked[0][3]


def test_submit_tells_a_refused_setting_as_it_was_written(services: Services) -> None:
    services.refusal = RequestError(
        "Invalid settings: Nothing of it was accepted.\nconfig.run.sed = 1: no",
        bad=True,
        problems=[Problem("config.run.sed", 1, "is not a setting", "one of name, seed", "seed")],
    )
    done = run("submit", "cartpole_ppo", "run.sed=1")
    told = "run.sed = 1: is not a setting; accepted: one of name, seed; did you mean 'seed'?\n"
    assert (2, "", told) == (done.exit_code, done.stdout, done.stderr)

    services.refusal = RequestError("the service at http://here does not answer: no")
    done = run("submit", "cartpole_ppo")
    assert (1, "the service at http://here does not answer: no\n") == (done.exit_code, done.stderr)


@pytest.mark.parametrize(
    ("text", "message"),
    [("inf", "is not finite"), ("2026-01-31", "is a date"), ("[nan]", "finite")],
)
def test_submit_refuses_what_json_lacks_by_its_path_and_sends_nothing(
    services: Services, tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "send", SEND)
    path = tmp_path / "mine.toml"
    path.write_text(f'[env]\nid = "CartPole-v1"\nkwargs = {{ limit = {text} }}\n')
    for arguments in ((str(path),), ("cartpole_ppo", f"env.kwargs.limit={text}")):
        done = run("submit", *arguments)
        assert (2, "", []) == (done.exit_code, done.stdout, services.asked)
        assert done.stderr.startswith("env.kwargs.limit")
        assert message in done.stderr


def test_submit_to_a_service_elsewhere_takes_the_token_of_the_environment(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIANFLOW_TOKEN", "secret")
    assert 0 == run("submit", "cartpole_ppo", "--address", "http://there:1/").exit_code
    assert "http://there:1secret" == services.asked[0][0]


def test_what_is_no_address_is_refused_before_anything_is_sent(services: Services) -> None:
    done = run("submit", "cartpole_ppo", "--address", "there:1")
    assert (2, []) == (done.exit_code, services.asked)
    assert "accepted: an address such as http://127.0.0.1:8080" in done.stderr


def test_submit_without_a_service_says_how_to_start_one(services: Services) -> None:
    services.there = False
    done = run("submit", "cartpole_ppo")
    assert 1 == done.exit_code
    assert "tianflow serve" in done.stderr
    assert [] == services.asked


def test_a_config_that_is_none_is_not_sent(services: Services) -> None:
    assert 2 == run("submit", "cartpole_pp").exit_code
    assert [] == services.asked


def test_status_shows_the_newest_ended_and_interrupted_runs_and_all_on_request(
    services: Services, tmp_path: Path
) -> None:
    shown = overview.ENDED_SHOWN
    found = {"state": "interrupted", "ended": None, "reasons": ["it is on disk"]}
    services.runs = [{"id": "new", **ENDED}]
    services.runs += [{"id": f"old-{n}", **found, "on_disk": True} for n in range(shown + 2)]
    arguments = ("status", "--runs-dir", str(tmp_path))
    lines = run(*arguments).stdout.splitlines()
    assert ["new", *(f"old-{n}" for n in range(shown - 1))] == [
        line.split()[0] for line in lines[1 : shown + 1]
    ]
    assert "3 more that do not run (tianflow status --all shows them)" == lines[-1]
    assert f"{shown - 1} of these are on disk" in lines[-2]
    assert 1 + shown + 2 == len(lines)
    everything = run(*arguments, "--all").stdout
    assert f"\n{shown + 2} of these are on disk" in everything
    assert "more that" not in everything


def test_many_ended_runs_without_a_service_are_one_line(services: Services, tmp_path: Path) -> None:
    services.there = False
    for n in range(overview.ENDED_SHOWN + 2):
        left(tmp_path, f"old-{n}")
        os.utime(tmp_path / f"old-{n}" / "summary.json", (n, n))
        left(tmp_path, f"killed-{n}")
        replace(services.own, run=f"killed-{n}", start_time=1).write(tmp_path / f"killed-{n}")
        os.utime(tmp_path / f"killed-{n}", (n, n))
    (line,) = run("status", "--runs-dir", str(tmp_path)).stdout.splitlines()
    assert "ended: old-11, old-10, old-9" in line
    assert "old-2 and 2 more (--all) (tianflow status RUN" in line
    assert "interrupted: killed-11, killed-10" in line
    assert "killed-2 and 2 more (--all)" in line
    everything = run("status", "--all", "--runs-dir", str(tmp_path)).stdout
    assert "old-0 (tianflow" in everything
    assert "more" not in everything


def test_submit_by_algorithm_and_environment_sends_the_settings_of_train(
    services: Services,
) -> None:
    done = run("submit", "ppo", "run.seed=7", "--env", "CartPole-v1")
    assert (0, "a-run: pending\n") == (done.exit_code, done.stdout)
    assert "settings: preset cartpole_ppo\n" == done.stderr
    body = services.asked[0][3]
    assert {} == body["overrides"]
    assert ("CartPole-v1", "ppo", 7) == (
        body["config"]["env"]["id"],
        body["config"]["algorithm"]["name"],
        body["config"]["run"]["seed"],
    )
    assert start_config("ppo", "CartPole-v1", {"run.seed": 7}) == load_config(body["config"])


def test_submit_by_algorithm_refuses_what_train_refuses(services: Services) -> None:
    done = run("submit", "cartpole_ppo", "--env", "CartPole-v1")
    assert (2, []) == (done.exit_code, services.asked)
    assert "an algorithm is expected" in done.stderr


def test_delete_asks_first_and_deletes_only_after_a_yes(services: Services) -> None:
    for typed in ("n\n", "\n", ""):
        done = run("delete", "old", typed=typed)
        assert (1, []) == (done.exit_code, services.asked)
        assert "delete run 'old' with its checkpoints, history and log?" in done.stdout
    done = run("delete", "old", typed="y\n")
    assert 0 == done.exit_code
    assert done.stdout.endswith("old: deleted\n")
    assert [("http://heret", "DELETE", "/api/v1/runs/old", None, {})] == services.asked


def test_delete_with_yes_asks_nothing_and_quotes_the_name(services: Services) -> None:
    done = run("delete", "a/../b c", "--yes")
    assert (0, "a%2F..%2Fb%20c: deleted\n") == (done.exit_code, done.stdout)
    assert "/api/v1/runs/a%2F..%2Fb%20c" == services.asked[0][2]


def test_delete_shows_why_it_is_refused(services: Services) -> None:
    services.refusal = RequestError("State conflict: run 'a' is running", status=409)
    done = run("delete", "a", "--yes")
    assert (1, "", "State conflict: run 'a' is running\n") == (
        done.exit_code,
        done.stdout,
        done.stderr,
    )
    services.there = False
    assert "tianflow serve" in run("delete", "a", "--yes").stderr
