"""Whatever is asked of either server, its answer is one that its document describes, and no
unexpected error.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.server.test_service import Client, opened, until, up
from tests.support.effort import FACTOR
from tests.support.fakes_run import FakeRun
from tianflow.config.model import HttpSettings
from tianflow.observability.rates import RunRates
from tianflow.server.common.auth import Guard, Tokens
from tianflow.server.common.event_feed import Feed
from tianflow.server.run.app import ServedRun, make_app

pytestmark = pytest.mark.e2e

HEADERS = {"Authorization": "Bearer c"}
NAMES = ("fake", "fake", "none", "%00", "..%2Ffake", "%ED%A0%80", "a" * 3000, "ж")
QUERIES = (
    "",
    "follow=false",
    "limit=0",
    "limit=1&before=1",
    "before=99999999999999999999",
    "limit=%00",
    "follow=perhaps",
)
BODIES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"1e999",
    b'"x"',
    b"\xff",
    b'{"a": ',
    b'{"max_staleness": "unbounded"}',
    b'{"count": 1e30}',
    b'{"config": 1}',
)
BODIES += (
    b'{"config": "cartpole_ppo", "overrides": {"env.id": "os:system"}}',
    b'{"config": {"env": {"id": "\\ud800"}}}',
    b'{"config": "../x"}',
)
TYPES = ("application/json", "application/merge-patch+json", "text/plain", "", "a/b; charset=x")
TAGS = ("*", '"1"', 'W/"1"', "\x80", "1")
METHODS = {"get", "head", "post", "patch", "delete"}
EACH = max(12, 6 * FACTOR)
"""Requests of each operation."""


class EndlessRun(FakeRun):
    """A run that ignores a stop, so that it still answers."""

    def _act(self, action: str, state: str, source: str) -> str:
        state = super()._act(action, state, source)
        self.state = "running"
        return state


@pytest.fixture(params=["train", "serve"])
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Client]:
    if request.param == "train":
        run = await asyncio.to_thread(EndlessRun)
        run.train(5)
        served = ServedRun(
            run, RunRates(read=run.statistics), Feed(events=run.events, clock=time.time)
        )
        guard = Guard(tokens=Tokens("c", "r"), loopback=True)
        async with TestClient(
            TestServer(
                make_app(
                    runs={run.id: served}, guard=guard, http=HttpSettings(max_requests_per_s=1e4)
                )
            )
        ) as client:
            yield client
    else:
        async with opened(tmp_path, limit=1) as world:
            await world.submit("fake")
            await until(up(world, "fake"))
            yield world.client


async def test_answers_to_odd_requests_are_described(client: Client) -> None:
    document = await (await client.get("/openapi.json", headers=HEADERS)).json()
    dice = random.Random(7)
    seen: set[int] = set()
    for path, item in document["paths"].items():
        for method in sorted(item.keys() & METHODS):
            described = {int(status) for status in item[method]["responses"]}
            for _ in range(EACH):
                status, told = await odd(client, dice, method, path)
                seen.add(status)
                assert status in described, told
                assert status < 500 or status == 503, told
    assert {200, 202, 400, 404, 415, 422} <= seen


async def odd(client: Client, dice: random.Random, method: str, path: str) -> tuple[int, str]:
    """Status of the answer to a request that is drawn, and what to say of it if it was wrong."""
    headers: dict[str, Any] = HEADERS | {
        "Content-Type": dice.choice(TYPES),
        "If-Match": dice.choice(TAGS),
        "Idempotency-Key": dice.choice(TAGS),
    }
    query = "follow=false" if path.endswith("/events") else dice.choice(QUERIES)
    target = f"{path.replace('{run}', dice.choice(NAMES))}?{query}"
    body = dice.choice(BODIES) if method in {"post", "patch"} else None
    async with (
        asyncio.timeout(10.0),
        client.request(
            method, target, data=body, headers=headers, allow_redirects=False
        ) as response,
    ):
        text = (await response.read()).decode(errors="replace")
        assert "Traceback" not in text
        return (
            response.status,
            f"{method} {target} {headers} {body!r}: {response.status} {text[:300]}",
        )
