"""The HTTP server of a run: answers, refusals, access, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from multidict import CIMultiDict
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.fakes_run import FakeRun
from tianflow.config.model import HttpSettings
from tianflow.core.payloads import Version
from tianflow.core.statistics import Diagnosis
from tianflow.errors import ConfigError
from tianflow.observability.rates import RunRates
from tianflow.rundir.control_file import ControlFile, process_start_time
from tianflow.server.common import live_settings
from tianflow.server.common.auth import NO_TOKENS, Guard, Tokens
from tianflow.server.common.event_feed import Feed
from tianflow.server.run.app import ServedRun, make_app
from tianflow.server.run.server import running, serve

TOKENS = Tokens("control-token", "read-token")
CONTROL = {"Authorization": "Bearer control-token"}
READ = {"Authorization": "Bearer read-token"}
MERGE = {"Content-Type": "application/merge-patch+json"}
RUN = "/api/v1/runs/fake"
Client = TestClient[Any, Any]


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun()
    run.train(5)
    return run


async def client_of(run: FakeRun, **settings: Any) -> Client:
    guard = Guard(**({"tokens": TOKENS, "loopback": True} | settings))
    served = ServedRun(run, RunRates(read=run.statistics), Feed(events=run.events, clock=time.time))
    app = make_app(runs={run.id: served}, guard=guard, http=HttpSettings())
    client: Client = TestClient(TestServer(app))
    await client.start_server()
    return client


@pytest.fixture
async def client(run: FakeRun) -> AsyncIterator[Client]:
    client = await client_of(run)
    yield client
    await client.close()


async def problem(response: aiohttp.ClientResponse, status: int) -> dict[str, Any]:
    assert status == response.status
    assert response.content_type == "application/problem+json"
    document: dict[str, Any] = json.loads(await response.text())
    assert status == document["status"]
    assert {"type", "title", "detail"} <= set(document)
    return document


async def patch(
    client: Client, resource: str, body: object, **headers: str
) -> aiohttp.ClientResponse:
    data = body if isinstance(body, bytes) else json.dumps(body)
    return await client.patch(f"{RUN}/{resource}", data=data, headers=CONTROL | MERGE | headers)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Looking
# --------------------------------------------------------------------------------------------------


async def test_live_and_ready_need_no_token(client: Client) -> None:
    for path in ("/livez", "/readyz"):
        assert (await client.get(path)).status == 200


async def test_a_stuck_coordinator_is_not_live(client: Client, run: FakeRun) -> None:
    run.alive = False
    response = await client.get("/livez")
    assert "1" == response.headers["Retry-After"]
    assert "fake" in (await problem(response, 503))["detail"]


async def test_not_ready_says_why(client: Client, run: FakeRun) -> None:
    run.ready, run.reasons = False, ("the learner is starting",)
    assert (await problem(await client.get("/readyz"), 503))["reasons"] == [
        "the learner is starting"
    ]


async def test_the_run_shows_what_a_screen_needs(client: Client, run: FakeRun) -> None:
    run.now += 1.0
    shown = await (await client.get(RUN, headers=READ)).json()
    assert "running" == shown["state"]
    assert {
        "bound": 1,
        "min": 0,
        "mean": 0.0,
        "p99": 0,
        "max": 0,
        "violations": 0,
        "counts": {"0": 10},
    } == shown["staleness"]
    assert {"lineage": 1, "number": 5} == shown["versions"]["learner"]
    assert (3.0, 1.0, 5.0, 5) == tuple(
        shown["returns"][key] for key in ("mean", "min", "max", "episodes")
    )
    assert {"return": 475.0, "reached_after_s": None} == shown["target"]
    assert {"10", "60", "300"} == set(shown["throughput"]["env_steps_per_s"])
    assert ["learner", "actor-0", "actor-1"] == [
        component["name"] for component in shown["components"]
    ]
    assert all(
        sum(component["shares"].values()) == pytest.approx(1.0) for component in shown["components"]
    )
    counts = shown["trajectories"]
    assert counts["trained"] + sum(counts["dropped"].values()) + counts["open"] == counts["begun"]


async def test_an_unbounded_run_says_so_in_words(client: Client) -> None:
    await patch(client, "balance", {"max_staleness": "unbounded"})
    assert (await (await client.get(RUN, headers=READ)).json())["staleness"]["bound"] == "unbounded"


async def test_runs_are_listed_with_their_address(client: Client) -> None:
    listed = await (await client.get("/api/v1/runs", headers=READ)).json()
    assert {"runs": [{"id": "fake", "state": "running", "ready": True, "href": RUN}]} == listed


async def test_components_audit_and_checkpoints_answer(client: Client, run: FakeRun) -> None:
    run.pause(source="cli")
    components = (await (await client.get(f"{RUN}/components", headers=READ)).json())["components"]
    assert {"kl": 0.01, "ess_ratio": 0.9, "divergence": 0.002} == components[0]["gauges"]
    assert (
        list(run.audit())
        == (await (await client.get(f"{RUN}/audit", headers=READ)).json())["audit"]
    )
    assert (
        "0000000100"
        == (await (await client.get(f"{RUN}/checkpoints", headers=READ)).json())["checkpoints"][0][
            "name"
        ]
    )


async def test_the_audit_log_is_read_page_by_page(client: Client, run: FakeRun) -> None:
    for action in ("pause", "resume", "pause"):
        await client.post(f"{RUN}/{action}", headers=CONTROL)
    newest = await (await client.get(f"{RUN}/audit?limit=2", headers=READ)).json()
    assert (["resume", "pause"], 1) == (
        [entry["action"] for entry in newest["audit"]],
        newest["next"],
    )
    oldest = await (
        await client.get(f"{RUN}/audit?limit=2&before={newest['next']}", headers=READ)
    ).json()
    assert (["pause"], None) == ([entry["action"] for entry in oldest["audit"]], oldest["next"])


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "before=-1",
        "before=1.0",
        "before=" + "9" * 20,
        "limit=१",
    ],
)
async def test_an_invalid_page_is_400(client: Client, query: str) -> None:
    assert 400 == (await client.get(f"{RUN}/audit?{query}", headers=READ)).status


async def test_the_diagnosis_answers_with_its_shares_and_advice(
    client: Client, run: FakeRun
) -> None:
    run.diagnosis = Diagnosis(
        "sampling-bound",
        "more actors",
        waits={"learner": 0.5, "actors": 0.0},
        suggested={"actors.count": 4},
    )
    document = await (await client.get(f"{RUN}/diagnosis", headers=READ)).json()
    assert {
        "id": "fake",
        "verdict": "sampling-bound",
        "advice": "more actors",
        "component": None,
    } == {key: document[key] for key in ("id", "verdict", "advice", "component")}
    assert ({"learner": 0.5, "actors": 0.0}, {"actors.count": 4}) == (
        document["waits"],
        document["suggested"],
    )
    status = await (await client.get(RUN, headers=READ)).json()
    assert "sampling-bound" == status["bottleneck"] == status["diagnosis"]["verdict"]


async def test_numbers_that_json_lacks_become_null(client: Client, run: FakeRun) -> None:
    run.evaluation = {"mean_return": float("nan")}
    text = await (await client.get(RUN, headers=READ)).text()
    assert "NaN" not in text
    assert {"mean_return": None} == json.loads(text)["evaluation"]


async def test_metrics_follow_the_accept_header_and_count_requests(client: Client) -> None:
    await client.get("/livez")
    response = await client.get(
        "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    assert "application/openmetrics-text" == response.content_type
    families = text_string_to_metric_families(await response.text())
    counted = {
        s.labels["code"]: s.value
        for f in families
        for s in f.samples
        if s.name == "tianflow_http_requests_total"
    }
    assert {"200": 1.0} == counted


@pytest.mark.parametrize(
    "path",
    ["/api/v1/runs/other", "/api/v1/runs/other/balance", "/api/v1/nothing", f"{RUN}/nothing"],
)
async def test_an_unknown_path_is_404(client: Client, path: str) -> None:
    await problem(await client.get(path, headers=READ), 404)


async def test_an_unknown_run_is_refused_with_the_known_ones(client: Client) -> None:
    assert (
        "fake"
        in (await problem(await client.post("/api/v1/runs/other/pause", headers=CONTROL), 404))[
            "detail"
        ]
    )


async def test_a_wrong_method_is_refused_with_the_accepted_ones(client: Client) -> None:
    response = await client.get(f"{RUN}/pause", headers=READ)
    await problem(response, 405)
    assert "POST" == response.headers["Allow"]


# Acting
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "state"),
    [
        ("pause", "paused"),
        ("resume", "running"),
        ("drain", "draining"),
        ("checkpoint", "running"),
        ("stop", "stopping"),
    ],
)
async def test_actions_return_the_resulting_state_and_may_be_repeated(
    client: Client, run: FakeRun, action: str, state: str
) -> None:
    for _ in range(2):
        response = await client.post(f"{RUN}/{action}", headers=CONTROL)
        assert 202 == response.status
        assert {"id": "fake", "action": action, "state": state} == await response.json()
    assert {("http:127.0.0.1", action)} == {
        (entry["source"], entry["action"]) for entry in run.audit()
    }


async def test_an_action_after_the_end_is_409(client: Client, run: FakeRun) -> None:
    run.state = "done"
    assert (
        "done" in (await problem(await client.post(f"{RUN}/pause", headers=CONTROL), 409))["detail"]
    )
    await problem(await patch(client, "balance", {"max_staleness": 4}), 409)


# Settings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "keys"),
    [
        (
            "balance",
            {
                "max_staleness",
                "credits",
                "straggler_patience",
                "min_fragment_steps",
                "controller",
                "parameters",
            },
        ),
        ("learner", {"learning_rate", "entropy_cost", "batch_trajectories", "slowdown"}),
        ("actors", {"count"}),
        ("env", {"set"}),
        ("weights", {"publish_interval_updates", "divergence_nats", "divergence_states"}),
        ("evaluation", {"every_s", "every_steps", "episodes"}),
    ],
)
async def test_a_resource_shows_its_live_settings(
    client: Client, resource: str, keys: set[str]
) -> None:
    response = await client.get(f"{RUN}/{resource}", headers=READ)
    assert keys == set(await response.json())
    assert '"1"' == response.headers["ETag"]
    assert "application/merge-patch+json" == response.headers["Accept-Patch"]


async def test_a_change_imports_allowed_modules_only(
    client: Client, run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_someone.py").write_text(
        "from os import system\nfrom tianflow_controllers.open_loop import OpenLoop as Base\n"
        "class Controller(Base): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "of_someone:Controller"
    found = await problem(await patch(client, "balance", {"controller": ["staleness", name]}), 422)
    assert "balance.controller" == found["errors"][0]["path"]
    assert 'http.allowed_imports = ["of_someone"]' in found["errors"][0]["accepted"]
    assert "of_someone" not in sys.modules
    http = run.config.http.model_copy(update={"allowed_imports": ("of_someone",)})
    run.config = run.config.model_copy(update={"http": http})
    await problem(await patch(client, "balance", {"controller": "of_someone:system"}), 422)
    assert 200 == (await patch(client, "balance", {"controller": name})).status
    # a controller in force may be sent back, although its module is not allowed
    http = run.config.http.model_copy(update={"allowed_imports": ()})
    run.config = run.config.model_copy(update={"http": http})
    assert 200 == (await patch(client, "balance", {"controller": name})).status


async def test_a_schedule_over_http_may_call_functions_of_allowed_modules_only(
    client: Client, run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_someone_else.py").write_text("def rate(progress):\n    return 1e-3\n")
    monkeypatch.syspath_prepend(tmp_path)
    body = {"learning_rate": {"schedule": "of_someone_else:rate", "over": 100}}
    found = await problem(await patch(client, "learner", body), 422)
    assert found["errors"][0]["path"].endswith("learning_rate.schedule")
    assert "of_someone_else" not in sys.modules
    http = run.config.http.model_copy(update={"allowed_imports": ("of_someone_else",)})
    run.config = run.config.model_copy(update={"http": http})
    response = await patch(client, "learner", body)
    assert 200 == response.status
    assert {**body["learning_rate"], "over": 100.0} == (await response.json())["learning_rate"]


async def test_a_patch_is_in_force_and_audited(client: Client, run: FakeRun) -> None:
    response = await patch(client, "balance", {"max_staleness": 4})
    assert 200 == response.status
    assert '"2"' == response.headers["ETag"]
    assert 4 == (await response.json())["max_staleness"] == run.config.bound
    assert "http:127.0.0.1" == run.audit()[-1]["source"]


async def test_a_learner_patch_reaches_both_of_its_sections_at_once(
    client: Client, run: FakeRun
) -> None:
    await patch(client, "learner", {"learning_rate": 1e-3, "slowdown": 2.0})
    assert (1e-3, 2.0, 2) == (
        run.config.algorithm.learning_rate,
        run.config.learner.slowdown,
        run.generation,
    )


async def test_a_whole_number_may_be_written_with_a_point(client: Client, run: FakeRun) -> None:
    response = await patch(client, "balance", b'{"max_staleness": 4.0, "straggler_patience": 2.0}')
    assert 200 == response.status
    assert (4, 2.0) == (run.config.balance.max_staleness, run.config.balance.straggler_patience)
    await problem(await patch(client, "balance", b'{"max_staleness": 4.5}'), 422)


@pytest.mark.parametrize(
    ("resource", "body", "path"),
    [
        ("evaluation", {"episodes": 2**63}, "evaluation.episodes"),
        ("balance", {"parameters": {"gain": -(10**30)}}, "balance.parameters.gain"),
    ],
)
async def test_a_number_that_is_too_large_changes_nothing(
    client: Client, run: FakeRun, resource: str, body: object, path: str
) -> None:
    document = await problem(await patch(client, resource, body), 422)
    assert [path] == [error["path"] for error in document["errors"]]
    assert 1 == run.generation


@pytest.mark.parametrize("depth", [9, 500, 900])
async def test_a_patch_nested_too_deeply_is_422(client: Client, run: FakeRun, depth: int) -> None:
    document = await problem(
        await patch(client, "balance", b'{"parameters": ' + b"[" * depth + b"]" * depth + b"}"), 422
    )
    assert ("balance", "is nested too deeply") == tuple(
        document["errors"][0][key] for key in ("path", "message")
    )
    assert 1 == run.generation


async def test_an_attribute_of_environments_changes_if_they_have_it(
    client: Client, run: FakeRun
) -> None:
    env = run.config.env.model_copy(update={"id": "tests.support.environments:LengthEnv"})
    run.config = run.config.model_copy(update={"env": env})
    response = await patch(client, "env", {"set": {"length": 7, "reward": 2.0}})
    assert 200 == response.status
    assert {"set": {"length": 7, "reward": 2.0}} == await response.json()
    assert isinstance(run.config.env.set["reward"], float)
    document = await problem(await patch(client, "env", {"set": {"lenght": 7}}), 422)
    (error,) = document["errors"]
    assert ("env.set.lenght", "length") == (error["path"], error["nearest"])
    assert (2, {"length": 7, "reward": 2.0}) == (run.generation, run.config.env.set)
    await patch(client, "env", {"set": {"length": None}})
    assert {"reward": 2.0} == run.config.env.set


async def test_changes_are_tried_one_after_another(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial may start a process."""
    trials: list[int] = []

    def tried(*_: object, limit_s: float) -> None:
        assert limit_s < 5.0, "a service waits 5 seconds"
        trials.append(1)
        assert 1 == sum(trials)
        time.sleep(0.01)
        trials.append(-1)

    monkeypatch.setattr(live_settings, "require_settable", tried)
    patches = [patch(client, "env", {"set": {"length": number}}) for number in range(4)]
    assert [200] * 4 == [response.status for response in await asyncio.gather(*patches)]
    assert 8 == len(trials)


async def test_a_change_meanwhile_counts_for_if_match(
    client: Client, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    def tried(*_: object, limit_s: float) -> None:
        changed = asyncio.run_coroutine_threadsafe(change(), loop)
        changed.result(timeout=limit_s)

    async def change() -> None:
        run.change({"balance": {"max_staleness": 3}}, source="test")

    monkeypatch.setattr(live_settings, "require_settable", tried)
    body = {"set": {"length": 7}}
    await problem(await patch(client, "env", body, **{"If-Match": '"1"'}), 412)
    assert {} == run.config.env.set


async def test_an_attribute_of_a_native_vector_is_refused(client: Client, run: FakeRun) -> None:
    document = await problem(await patch(client, "env", {"set": {"length": 7}}), 422)
    (error,) = document["errors"]
    assert ("env.set", True) == (error["path"], "native vector" in error["message"])
    assert 1 == run.generation


@pytest.mark.parametrize("value", ["/etc/passwd", "os:system"])
async def test_an_attribute_from_http_names_no_place_and_no_object(
    client: Client, run: FakeRun, value: str
) -> None:
    document = await problem(await patch(client, "env", {"set": {"length": value}}), 422)
    assert ["env.set.length"] == [error["path"] for error in document["errors"]]
    assert 1 == run.generation


async def test_null_returns_to_the_default(client: Client, run: FakeRun) -> None:
    await patch(client, "balance", {"max_staleness": 4})
    await patch(client, "balance", {"max_staleness": None})
    assert 1 == run.config.bound


async def test_an_empty_patch_changes_nothing(client: Client, run: FakeRun) -> None:
    assert 200 == (await patch(client, "balance", {})).status
    assert 1 == run.generation


async def test_a_bad_value_names_the_field_and_changes_nothing(
    client: Client, run: FakeRun
) -> None:
    document = await problem(
        await patch(client, "balance", {"min_fragment_steps": 4, "max_staleness": -1}), 422
    )
    assert ["balance.max_staleness"] == [error["path"] for error in document["errors"]]
    assert -1 == document["errors"][0]["value"]
    assert document["errors"][0]["message"]
    assert (1, 8) == (run.generation, run.config.balance.min_fragment_steps)


@pytest.mark.parametrize(
    ("resource", "path", "nearest"),
    [
        ("balance", "balance.max_stalenes", "max_staleness"),
        ("learner", "learner.slowdwn", "slowdown"),
        ("learner", "algorithm.learning_rte", "learning_rate"),
    ],
)
async def test_an_unknown_key_names_the_nearest(
    client: Client, run: FakeRun, resource: str, path: str, nearest: str
) -> None:
    error = (await problem(await patch(client, resource, {path.partition(".")[2]: 1}), 422))[
        "errors"
    ][0]
    assert (path, nearest) == (error["path"], error["nearest"].rpartition(".")[2])
    assert 1 == run.generation


async def test_a_setting_that_needs_a_new_run_is_422(client: Client, run: FakeRun) -> None:
    await problem(await patch(client, "learner", {"device": "cpu"}), 422)
    assert 1 == run.generation


@pytest.mark.parametrize("body", [[1], 3, "text", None])
async def test_a_body_that_is_not_an_object_is_422(client: Client, body: object) -> None:
    await problem(await patch(client, "balance", body), 422)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"max_staleness": NaN}',
        b'{"max_staleness": 1, "max_staleness": 2}',
        b"[" * 20_000,
        b'{"a":' + b"9" * 5000 + b"}",
    ],
)
async def test_malformed_json_is_400(client: Client, run: FakeRun, body: bytes) -> None:
    await problem(await patch(client, "balance", body), 400)
    assert 1 == run.generation


async def test_an_infinite_number_is_422_with_a_readable_value(client: Client) -> None:
    document = await problem(await patch(client, "balance", b'{"straggler_patience": 1e400}'), 422)
    assert "inf" == document["errors"][0]["value"]


@pytest.mark.parametrize(
    "content_type", ["application/json", "text/plain", "application/json-patch+json"]
)
async def test_another_content_type_is_415_with_the_accepted_one(
    client: Client, content_type: str
) -> None:
    response = await patch(
        client, "balance", {"max_staleness": 4}, **{"Content-Type": content_type}
    )
    await problem(response, 415)
    assert "application/merge-patch+json" == response.headers["Accept-Patch"]


@pytest.mark.parametrize("tag", ['"1"', "*", '"7", "1"', 'W/"1" , "1"'])
async def test_a_patch_for_this_generation_is_applied(client: Client, tag: str) -> None:
    assert 200 == (await patch(client, "balance", {"max_staleness": 4}, **{"If-Match": tag})).status


@pytest.mark.parametrize("tag", ['"2"', 'W/"1"', '""', '"01"', '"*"'])
async def test_a_patch_for_another_generation_is_412(
    client: Client, run: FakeRun, tag: str
) -> None:
    response = await patch(client, "balance", {"max_staleness": 4}, **{"If-Match": tag})
    await problem(response, 412)
    assert '"1"' == response.headers["ETag"]
    assert 1 == run.generation


async def test_tags_of_several_lines_are_one_list(client: Client) -> None:
    headers = CIMultiDict(
        [
            *CONTROL.items(),
            ("Content-Type", "application/merge-patch+json"),
            ("If-Match", '"7"'),
            ("If-Match", '"1"'),
        ]
    )
    async with client.patch(f"{RUN}/balance", data=b"{}", headers=headers) as response:
        assert 200 == response.status


@pytest.mark.parametrize(
    "tag", ["", "1", '"1', '"1" "2"', '"1",', "*, *", '"a b"', 'w/"1"', '"1"; "2"']
)
async def test_an_invalid_list_of_tags_is_400(client: Client, run: FakeRun, tag: str) -> None:
    await problem(await patch(client, "balance", {"max_staleness": 4}, **{"If-Match": tag}), 400)
    assert 1 == run.generation


async def test_a_large_body_is_413(client: Client, run: FakeRun) -> None:
    await problem(await patch(client, "balance", b" " * (64 * 1024) + b"{}"), 413)
    assert 1 == run.generation


async def test_a_large_body_of_unknown_length_is_413(client: Client) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(65):
            yield b" " * 1024

    await problem(await client.patch(f"{RUN}/balance", data=chunks(), headers=CONTROL | MERGE), 413)


# Access
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic control-token"},
        {"Authorization": "Bearer "},
    ],
)
async def test_without_a_token_nothing_is_revealed(client: Client, headers: dict[str, str]) -> None:
    for path in ("/api/v1/runs", RUN, f"{RUN}/balance", "/api/v1/runs/other"):
        response = await client.get(path, headers=headers)
        await problem(response, 401)
        assert "Bearer" == response.headers["WWW-Authenticate"]


async def test_the_read_token_reads_and_changes_nothing(client: Client, run: FakeRun) -> None:
    assert 200 == (await client.get(RUN, headers=READ)).status
    await problem(await client.post(f"{RUN}/stop", headers=READ), 403)
    await problem(await client.patch(f"{RUN}/balance", data="{}", headers=READ | MERGE), 403)
    assert (run.state, run.generation) == ("running", 1)


async def test_metrics_need_a_token_unless_on_loopback(run: FakeRun) -> None:
    client = await client_of(run, loopback=False)
    try:
        await problem(await client.get("/metrics"), 401)
        assert 200 == (await client.get("/metrics", headers=READ)).status
        assert 200 == (await client.get("/livez")).status
    finally:
        await client.close()


async def test_no_tokens_open_everything_on_loopback_only(run: FakeRun) -> None:
    client = await client_of(run, tokens=NO_TOKENS)
    try:
        assert 202 == (await client.post(f"{RUN}/pause")).status
    finally:
        await client.close()
    with pytest.raises(ConfigError, match="token"):
        Guard(tokens=NO_TOKENS, loopback=False)


@pytest.mark.parametrize(("control", "read"), [("a", ""), ("", "a"), ("a", "a")])
def test_a_single_token_is_refused(control: str, read: str) -> None:
    with pytest.raises(ValueError, match="two different tokens are required, or none"):
        Tokens(control, read)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80"]
)
async def test_a_foreign_host_is_421(client: Client, host: str) -> None:
    await problem(await client.get("/livez", headers={"Host": host}), 421)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "localhost.", "[::1]:8080"]
)
async def test_names_of_this_machine_are_accepted(client: Client, host: str) -> None:
    assert 200 == (await client.get("/livez", headers={"Host": host})).status


async def test_an_allowed_host_is_accepted(run: FakeRun) -> None:
    client = await client_of(run, allowed_hosts=("Trainer.example",))
    try:
        assert 200 == (await client.get("/livez", headers={"Host": "trainer.example:8080"})).status
        assert (
            200
            == (await client.get("/livez", headers={"Origin": "https://trainer.example"})).status
        )
    finally:
        await client.close()


async def test_an_unreadable_host_is_400(client: Client) -> None:
    await problem(await client.get("/livez", headers={"Host": "[::1"}), 400)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost:1",
        "http://127.0.0.1",
        "http://[",
        "http://[x]",
    ],
)
async def test_a_page_of_another_origin_is_refused(
    client: Client, run: FakeRun, origin: str
) -> None:
    await problem(await client.post(f"{RUN}/stop", headers=CONTROL | {"Origin": origin}), 403)
    assert "running" == run.state


async def test_the_servers_own_page_is_accepted(client: Client) -> None:
    own = str(client.make_url("/")).rstrip("/")
    assert 202 == (await client.post(f"{RUN}/pause", headers=CONTROL | {"Origin": own})).status


async def test_an_unexpected_error_leaks_nothing_and_is_logged(
    client: Client, run: FakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a secret")

    run.statistics = fail  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.ERROR, logger="tianflow"):
        response = await client.get(f"{RUN}/components", headers=READ)
    document = await problem(response, 500)
    assert "secret" not in json.dumps(document)
    assert "Traceback" not in json.dumps(document)
    record = caplog.records[-1]
    assert document["id"] == record.id  # type: ignore[attr-defined]
    assert record.exc_info is not None


async def test_answers_are_neither_cached_nor_sniffed(client: Client) -> None:
    for path in ("/livez", "/metrics", "/nothing"):
        response = await client.get(path, headers=READ)
        assert ("no-store", "nosniff") == (
            response.headers["Cache-Control"],
            response.headers["X-Content-Type-Options"],
        )


# The server
# --------------------------------------------------------------------------------------------------


async def test_a_server_announces_itself_and_cleans_up(run: FakeRun, tmp_path: Path) -> None:
    file = tmp_path / "control.json"
    async with serve(run, HttpSettings(port=0), TOKENS, tmp_path) as server:
        assert 0o600 == stat.S_IMODE(file.stat().st_mode)
        announced = await asyncio.to_thread(ControlFile.read, tmp_path)
        assert announced is not None
        assert ("fake", os.getpid(), server.address) == (
            announced.run,
            announced.pid,
            announced.address,
        )
        assert ("control-token", "read-token") == (announced.token, announced.read_token)
        assert await asyncio.to_thread(lambda: announced.alive)
        async with aiohttp.ClientSession(
            announced.address, headers={"Authorization": f"Bearer {announced.token}"}
        ) as session:
            assert "fake" == (await (await session.get(RUN)).json())["id"]
    assert [] == names(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", server.port))


async def test_the_server_samples_rates_by_itself(run: FakeRun, tmp_path: Path) -> None:
    async with (
        serve(run, HttpSettings(), TOKENS, tmp_path) as server,
        aiohttp.ClientSession(server.address, headers=READ) as session,
    ):
        await session.get(RUN)
        run.train(4)
        shown = await (await session.get(RUN)).json()
    assert {"10": 64.0, "60": 64.0, "300": 64.0} == shown["throughput"]["env_steps_per_s"]
    assert 1.0 == shown["throughput"]["updates_per_s"]["10"]


@pytest.mark.parametrize("required", [False, True])
async def test_a_component_that_dies_is_logged_at_once_and_ends_nothing_unless_it_is_required(
    caplog: pytest.LogCaptureFixture, required: bool
) -> None:
    async def dies(started: Callable[[], None]) -> None:
        started()
        await asyncio.sleep(0)
        raise ZeroDivisionError

    expected = pytest.raises(ZeroDivisionError) if required else contextlib.nullcontext()
    with expected:
        async with running(dies, "the speeds are no longer measured", required=required):
            await asyncio.sleep(0.01)
            (record,) = [r for r in caplog.records if "no longer measured" in r.getMessage()]
            assert "ZeroDivisionError" in vars(record)["details"]


async def test_a_port_in_use_is_an_error_that_names_it(run: FakeRun, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"http\.port = {port}: is in use on 127\.0\.0\.1"):
            async with serve(run, HttpSettings(port=port), TOKENS, tmp_path):
                pass
    assert [] == names(tmp_path)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_a_host_of_another_machine_is_an_error_that_names_it(
    run: FakeRun, tmp_path: Path, host: str
) -> None:
    with pytest.raises(ConfigError, match=r"http\.host"):
        async with serve(run, HttpSettings(host=host), TOKENS, tmp_path):
            pass


async def test_a_server_for_other_machines_needs_tokens(run: FakeRun, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="would let every machine that reaches this address control the run"
    ):
        async with serve(run, HttpSettings(host="0.0.0.0"), NO_TOKENS, tmp_path):
            pass
    async with serve(run, HttpSettings(host="0.0.0.0"), TOKENS, tmp_path) as server:
        assert server.address.startswith("http://127.0.0.1:")
        async with aiohttp.ClientSession(server.address) as session:
            assert 200 == (await session.get("/livez")).status
            assert 401 == (await session.get("/metrics")).status


async def test_the_server_ends_within_two_seconds_whatever_is_open(
    run: FakeRun, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    async with serve(run, HttpSettings(), TOKENS, tmp_path) as server:
        _, idle = await asyncio.open_connection("127.0.0.1", server.port)
        reader, half = await asyncio.open_connection("127.0.0.1", server.port)
        half.write(f"GET /livez HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n".encode())
        await reader.readline()
        half.write(
            f"PATCH {RUN}/balance HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            "control-token\r\n"
            "Content-Type: application/merge-patch+json\r\nContent-Length: 100\r\n\r\n{".encode()
        )
        await half.drain()
        await asyncio.sleep(0.05)
        began = loop.time()
    assert loop.time() - began < 2.0
    for writer in (idle, half):
        writer.close()
    assert 1 == run.generation


async def test_the_server_ends_when_its_user_fails(run: FakeRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="user"):
        async with serve(run, HttpSettings(), TOKENS, tmp_path):
            raise ValueError("user")
    assert [] == names(tmp_path)


async def test_another_process_control_file_is_left_alone(run: FakeRun, tmp_path: Path) -> None:
    async with serve(run, HttpSettings(), TOKENS, tmp_path):
        other = ControlFile(
            run="fake", pid=1, start_time=1, address="http://127.0.0.1:1", token="a", read_token="b"
        )
        await asyncio.to_thread(other.write, tmp_path)
    assert other == await asyncio.to_thread(ControlFile.read, tmp_path)


def test_a_pid_used_again_is_not_the_same_process(tmp_path: Path) -> None:
    mine = process_start_time(os.getpid())
    assert mine is not None
    for start_time, alive in ((mine, True), (mine - 1, False), (None, False)):
        file = ControlFile(
            run="a", pid=os.getpid(), start_time=start_time, address="", token="", read_token=""
        )
        assert alive == file.alive


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "a"}', "[" * 100_000])
def test_an_unreadable_control_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "control.json").write_text(text)
    assert ControlFile.read(tmp_path) is None


# Speeds
# --------------------------------------------------------------------------------------------------


def test_rates_have_windows_of_their_own() -> None:
    run = FakeRun()
    rates = RunRates(read=run.statistics)
    assert rates.steps_per_s(10.0) is None
    for seconds in [1.0] * 100 + [0.5] * 40:
        rates.sample()
        run.train(1, seconds=seconds)
    rates.sample()
    assert rates.updates_per_s(10.0) == pytest.approx(2.0, abs=0.1)
    assert rates.updates_per_s(60.0) == pytest.approx(80 / 60, abs=0.05)
    assert rates.updates_per_s(300.0) == pytest.approx(140 / 120, abs=0.01)
    assert rates.steps_per_s(10.0) == pytest.approx(128.0, rel=0.05)
    assert Version(1, 140) == run.ledger.version


def test_frequent_samples_do_not_push_the_window_out() -> None:
    run = FakeRun()
    rates = RunRates(read=run.statistics)
    for _ in range(4000):
        run.now += 0.1
        rates.sample()
    assert len(rates._samples) <= 302
    assert rates._samples[-1].now - rates._samples[0].now >= 300.0
