"""The OpenAPI document is one, describes every route and nothing else, and what is answered is what
it says.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.server.test_run_server import CONTROL, READ, RUN, Client, client_of, patch
from tests.support.effort import some
from tests.support.fakes_run import FakeRun
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config, EnvSettings
from tianflow.core.events import (
    EnvironmentFailed,
    EpisodesFinished,
    EvaluationFinished,
    Event,
    HostExited,
    SettingsChanged,
    UpdateFinished,
)
from tianflow.server.common import console
from tianflow.server.common.event_feed import Feed
from tianflow.server.common.live_settings import RESOURCES, live_values
from tianflow.server.common.openapi import document
from tianflow.server.run.app import ACTIONS, PARTS

Document = dict[str, Any]
METHODS = {"get", "head", "post", "patch", "put", "delete"}


@pytest.fixture(params=[False, True], ids=["plain", "replay"])
def run(request: pytest.FixtureRequest) -> FakeRun:
    run = FakeRun(replay=request.param)
    run.train(5)
    return run


@pytest.fixture
async def client(run: FakeRun) -> AsyncIterator[Client]:
    client = await client_of(run)
    yield client
    await client.close()


async def described(client: Client) -> Document:
    response = await client.get("/openapi.json", headers=READ)
    assert 200 == response.status
    found: Document = await response.json()
    return found


def config_of(algorithm: str) -> Config:
    return Config(
        env=EnvSettings(id="CartPole-v1"),
        algorithm=BUILT_IN_ALGORITHMS[algorithm].model_validate({"name": algorithm}),
    )


def document_of(*algorithms: str) -> Document:
    return document({name: config_of(name) for name in algorithms}, parts=PARTS, actions=ACTIONS)


def check(whole: Document, schema: Document, value: object) -> None:
    Draft202012Validator({**schema, "components": whole["components"]}).validate(value)


def resolved(whole: Document, found: Document) -> Document:
    while "$ref" in found:
        place: Any = whole
        for part in found["$ref"].removeprefix("#/").split("/"):
            place = place[part]
        found = place
    return found


def body_schema(whole: Document, path: str, method: str, status: int) -> Document:
    answer = resolved(whole, whole["paths"][path][method]["responses"][str(status)])
    schema: Document = next(iter(answer["content"].values()))["schema"]
    return schema


# The document
# --------------------------------------------------------------------------------------------------


async def test_it_is_an_openapi_document(client: Client) -> None:
    OpenAPIV31SpecValidator(await described(client)).validate()


@pytest.mark.parametrize("algorithms", some([tuple(BUILT_IN_ALGORITHMS), (), ("ppo",)]))
def test_it_is_valid_for_no_run_one_run_and_all_algorithms_at_once(
    algorithms: tuple[str, ...],
) -> None:
    OpenAPIV31SpecValidator(document_of(*algorithms)).validate()


async def test_every_route_is_described_and_nothing_else(client: Client) -> None:
    files = console.PATHS - {"/"}  # of the page, and no part of the API
    routes = {
        (method.lower(), path)
        for method, pattern in registered(client.app)
        for path in spelt_out(pattern)
        if path not in files
    }
    whole = await described(client)
    operations = {
        (method, path) for path, item in whole["paths"].items() for method in item.keys() & METHODS
    }
    assert routes == operations
    assert len(operations) == len(
        {whole["paths"][path][method]["operationId"] for method, path in operations}
    )


def registered(app: web.Application | None) -> list[tuple[str, str]]:
    assert app is not None
    found = []
    for route in app.router.routes():
        assert route.resource is not None
        info = route.resource.get_info()
        found.append(
            (
                route.method,
                info["path"] if "path" in info else info["pattern"].pattern.replace("\\", ""),
            )
        )
    return found


def spelt_out(pattern: str) -> list[str]:
    """One path for each alternative of a pattern; the run stays a parameter."""
    pattern = pattern.replace("(?P<run>[^{}/]+)", "{run}")
    choice = re.search(r"\(\?P<\w+>([^)]*)\)", pattern)
    if choice is None:
        return [pattern]
    return [pattern.replace(choice[0], name) for name in choice[1].split("|")]


def test_the_described_security_is_that_of_the_guard() -> None:
    whole = document_of("ppo")
    assert [{"token": []}] == whole["security"]
    free = {
        (method, path)
        for path, item in whole["paths"].items()
        for method in item.keys() & METHODS
        if item[method].get("security") == []
    }
    assert {
        (method, path) for method in ("get", "head") for path in ("/", "/livez", "/readyz")
    } == free
    for path, item in whole["paths"].items():
        for method in item.keys() & METHODS:
            assert ("401" in item[method]["responses"]) == ((method, path) not in free)


# Answers are as it says
# -----------------------------------------------------------------------------------------------


PLAIN = [
    "/livez",
    "/readyz",
    "/api/v1/runs",
    RUN,
    *(f"{RUN}/{part}" for part in (*PARTS, *RESOURCES)),
]


@pytest.mark.parametrize("path", PLAIN)
async def test_answers_are_as_described(client: Client, run: FakeRun, path: str) -> None:
    run.evaluation = {"version": 3.0, "mean_return": float("nan")}
    run.restarts = {("actors-0", "killed"): 2}
    run.pause(source="test")
    whole = await described(client)
    template = path.replace("/fake", "/{run}")
    response = await client.get(path, headers=READ)
    schema = body_schema(whole, template, "get", 200)
    check(whole, schema, await response.json())
    assert schema.get("additionalProperties") is False or "$ref" in schema, (
        "what is not described would be refused"
    )
    for name in whole["paths"][template]["get"]["responses"]["200"].get("headers", {}):
        assert name in response.headers


@pytest.mark.parametrize("action", ACTIONS)
async def test_answers_to_actions_are_as_described(client: Client, action: str) -> None:
    whole = await described(client)
    response = await client.post(f"{RUN}/{action}", headers=CONTROL)
    check(
        whole,
        body_schema(whole, f"/api/v1/runs/{{run}}/{action}", "post", response.status),
        await response.json(),
    )
    assert "Location" in response.headers


@pytest.mark.parametrize(
    ("ask", "path", "method", "status"),
    [
        (("GET", "/api/v1/runs/other", READ, None), "/api/v1/runs/{run}", "get", 404),
        (("GET", RUN, {}, None), "/api/v1/runs/{run}", "get", 401),
        (("GET", f"{RUN}/events?follow=x", READ, None), "/api/v1/runs/{run}/events", "get", 400),
        (("POST", f"{RUN}/pause", READ, None), "/api/v1/runs/{run}/pause", "post", 403),
        (("PATCH", f"{RUN}/balance", CONTROL, b"{}"), "/api/v1/runs/{run}/balance", "patch", 415),
    ],
)
async def test_refusals_are_as_described(
    client: Client,
    ask: tuple[str, str, dict[str, str], bytes | None],
    path: str,
    method: str,
    status: int,
) -> None:
    whole = await described(client)
    response = await client.request(ask[0], ask[1], headers=ask[2], data=ask[3])
    assert status == response.status
    check(whole, body_schema(whole, path, method, status), await response.json())
    for name in resolved(whole, whole["paths"][path][method]["responses"][str(status)])["headers"]:
        assert name in response.headers


async def test_a_refused_patch_is_as_described(client: Client) -> None:
    whole = await described(client)
    for body, more, status in (
        ({"nothing": 1}, {}, 422),
        (b"{", {}, 400),
        ({}, {"If-Match": '"7"'}, 412),
    ):
        response = await patch(client, "balance", body, **more)
        assert status == response.status
        check(
            whole,
            body_schema(whole, "/api/v1/runs/{run}/balance", "patch", status),
            await response.json(),
        )


@pytest.mark.parametrize(
    "event",
    [
        UpdateFinished(1, 0.1, 64, {"loss": float("nan")}),
        EpisodesFinished("actor-0", (1.0,), (10,)),
        EnvironmentFailed("actor-0", "raised", "no"),
        EvaluationFinished(1, 1, float("inf"), (float("inf"),)),
        HostExited("actors-0", "killed"),
        SettingsChanged(2, ("balance.credits",)),
    ],
)
def test_events_are_as_described(run: FakeRun, event: Event) -> None:
    feed = Feed(events=run.events, clock=lambda: 1.0)
    run.events.publish(event)
    feed.poll()
    told = feed.since(0, 1)[1][0]
    whole = document_of("ppo")
    stream = whole["paths"]["/api/v1/runs/{run}/events"]["get"]["responses"]["200"]
    check(whole, stream["x-events"][told.kind], dict(told.data))


# Settings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", BUILT_IN_ALGORITHMS)
@pytest.mark.parametrize("resource", RESOURCES)
def test_live_settings_of_every_algorithm_are_as_described(algorithm: str, resource: str) -> None:
    whole, values = document_of(algorithm), live_values(config_of(algorithm), resource)
    schema = body_schema(whole, f"/api/v1/runs/{{run}}/{resource}", "get", 200)
    assert set(values) == set(schema["properties"])
    check(whole, schema, values)
    taken = whole["paths"][f"/api/v1/runs/{{run}}/{resource}"]["patch"]["requestBody"]["content"][
        "application/merge-patch+json"
    ]["schema"]
    check(whole, taken, {})
    check(whole, taken, dict.fromkeys(values))


@pytest.mark.parametrize(
    ("resource", "body"),
    [
        ("balance", {"max_staleness": 4.0, "credits": None}),
        ("balance", {"max_staleness": "unbounded"}),
        ("balance", {"parameters": {"gain": None}}),
        ("balance", {"parameters": None}),
        ("balance", {"controller": ["staleness", "freshest"]}),
        ("learner", {"learning_rate": 0, "slowdown": None}),
        ("learner", {"learning_rate": {"schedule": "constant", "start": 0.5}}),
        ("actors", {}),
    ],
)
async def test_values_that_the_schema_allows_are_accepted(
    client: Client, resource: str, body: dict[str, object]
) -> None:
    whole = await described(client)
    taken = whole["paths"][f"/api/v1/runs/{{run}}/{resource}"]["patch"]["requestBody"]["content"][
        "application/merge-patch+json"
    ]["schema"]
    check(whole, taken, body)
    assert 200 == (await patch(client, resource, body)).status


@pytest.mark.parametrize(
    ("resource", "body"),
    [
        ("balance", {"max_staleness": -1}),
        ("balance", {"max_staleness": "none"}),
        ("balance", {"credits": 0}),
        ("balance", {"nothing": 1}),
        ("balance", {"memory_limit": 1}),
        ("actors", {"count": 1.5}),
        ("evaluation", {"episodes": 2**63}),
        ("balance", {"max_staleness": 10**30}),
        ("learner", {"learning_rate": -1.0}),
        ("learner", {"learning_rate": {"schedule": "linear", "unit": "frames"}}),
        ("evaluation", {"every_s": 0.0}),
    ],
)
async def test_values_that_the_schema_forbids_are_refused(
    client: Client, resource: str, body: dict[str, object]
) -> None:
    whole = await described(client)
    taken = whole["paths"][f"/api/v1/runs/{{run}}/{resource}"]["patch"]["requestBody"]["content"][
        "application/merge-patch+json"
    ]["schema"]
    assert not Draft202012Validator(taken).is_valid(body)
    assert 422 == (await patch(client, resource, body)).status


def test_runs_of_two_algorithms_accept_the_settings_of_either() -> None:
    whole = document_of("ppo", "dqn")
    schema = body_schema(whole, "/api/v1/runs/{run}/learner", "get", 200)
    assert 2 == len(schema["anyOf"])
    for name in ("ppo", "dqn"):
        check(whole, schema, live_values(config_of(name), "learner"))
    assert "anyOf" not in body_schema(whole, "/api/v1/runs/{run}/actors", "get", 200)
