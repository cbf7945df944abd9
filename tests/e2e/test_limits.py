"""Limits of both servers beside real training: many streams at once, and bodies without end."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.harness import run, until
from tests.e2e.test_serve import service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STREAMS, ALLOWED = 1000, 32
PATIENCE_S = 120.0
MORE = 400
"""Environment steps that must be made while all streams are open."""
LARGER_BY = 48 * 2**20
"""Bytes by which a server may grow while all its streams are open, or while it is sent too much."""
STEADY: Mapping[str, Any] = {
    "http__max_requests_per_s": 5000.0,
    "http__max_streams": ALLOWED,
    "http__max_connections": 2 * STREAMS,
    "algorithm__epochs": None,
    "algorithm__minibatch_size": None,
    "env__id": "tests.support.oracle:EchoEnv",
    "env__kwargs": {"seconds": 0.01, "jitter": False},
    "algorithm__name": "tests.e2e.steady:SteadyOracle",
    "algorithm__update_s": 0.05,
    "algorithm__batch_trajectories": 2,
    "actors__rollout_steps": 8,
    "balance__min_fragment_steps": 1,
    "balance__max_staleness": 4,
    "evaluation__episodes": 1,
    "evaluation__num_envs": 1,
}
"""A run that sleeps: its speed hardly depends on what else this machine does."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Open:
    """A server that answers for a run that trains."""

    kind: str
    address: str
    token: str
    run: str
    pid: int
    steps: Callable[[], int]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def resident(self) -> int:
        """Bytes of memory of its process."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def until_steps(self, more: int) -> None:
        """Until the run has made so many ``more``."""
        before = self.steps()
        until(f"{before + more} steps", lambda: self.steps() >= before + more, within_s=PATIENCE_S)


@pytest.fixture(name="server", scope="module", params=["train", "serve"])
def _server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Open]:
    """Each of the two kinds, for all tests: the places that one leaves are those of the next."""
    with opened(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[Open]:
    if kind == "train":
        config = folder / "oracle.toml"
        config.write_text(
            "[env]\nid = 'tests.support.oracle:EchoEnv'\n[algorithm]\nname = "
            "'tests.e2e.steady:SteadyOracle'\n"
        )
        record = str(folder / "record")
        with run(folder / "runs", str(config), algorithm__record=record, **STEADY) as live:
            live.until_training(more=3, within_s=PATIENCE_S)
            assert live.control is not None
            control = live.control
            yield Open(
                kind,
                control.address,
                control.token,
                live.name,
                control.pid,
                lambda: live.status()["progress"]["env_steps"],
            )
    else:
        with service(
            folder / "runs", "--max-streams", str(ALLOWED), "--max-connections", str(2 * STREAMS)
        ) as served:
            served.submit(
                "a", env__id="tests.support.environments:SlowEnv", env__kwargs={"seconds": 0.02}
            )
            served.until_training("a")
            control = served.control
            yield Open(
                kind,
                control.address,
                control.token,
                "a",
                control.pid,
                lambda: served.run("a")["progress"]["env_steps"],
            )


def test_a_hundred_megabytes_are_refused_and_not_kept(server: Open) -> None:
    small = server.resident()
    host, port = server.address.removeprefix("http://").split(":")
    head = (
        f"POST /api/v1/runs/{server.run}/pause HTTP/1.1\r\nHost: {host}\r\nAuthorization: "
        f"Bearer {server.token}\r\n"
    )
    for how, chunk in (
        ("Content-Length: 104857600", b" " * 2**16),
        ("Transfer-Encoding: chunked", b"10000\r\n" + b" " * 2**16 + b"\r\n"),
    ):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(f"{head}{how}\r\n\r\n".encode())
            sent = 0
            try:
                while sent < 100 * 2**20:
                    connection.sendall(chunk)
                    sent += len(chunk)
            except ConnectionError:  # it takes what comes for a while, and then no more
                pass
            answer = connection.recv(2**16)
        grown = server.resident() - small
        log.info("%s: %.0f MiB taken; %+.1f MiB", how, sent / 2**20, grown / 2**20)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert grown < LARGER_BY
    server.until_steps(1)


async def crowd(server: Open) -> tuple[Counter[int], set[bool], int, int]:
    """1,000 readers at once while the run trains: answers by status, whether refusals had
    Retry-After, bytes, events read.
    """
    statuses: Counter[int] = Counter()
    with_retry: set[bool] = set()
    events = 0

    async def read(session: aiohttp.ClientSession) -> None:
        nonlocal events
        async with session.get(
            f"{server.address}/api/v1/runs/{server.run}/events", headers=server.headers
        ) as answer:
            statuses[answer.status] += 1
            if answer.status != 200:
                with_retry.add("Retry-After" in answer.headers)
                return
            async for line in answer.content:
                events += line.startswith(b"event:")

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        readers = [asyncio.create_task(read(session)) for _ in range(STREAMS)]
        async with asyncio.timeout(PATIENCE_S):
            while statuses.total() < STREAMS:  # noqa: ASYNC110 - answers of a server are waited for
                await asyncio.sleep(0.05)
        await asyncio.to_thread(server.until_steps, MORE)
        large = server.resident()
        async with asyncio.timeout(PATIENCE_S):
            while events <= ALLOWED:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        for reader in readers:
            reader.cancel()
        ended = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(None), asyncio.CancelledError} >= {type(end) for end in ended}
    return statuses, with_retry, large, events


def test_a_thousand_streams_at_once_end_no_training_and_leave_their_places(server: Open) -> None:
    """Refused streams release their places. Benchmarks measure the costs of open ones."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > STREAMS + 100
    small = server.resident()
    statuses, with_retry, large, events = asyncio.run(crowd(server))
    log.info(
        "answers %s; %d events read; %+.1f MiB", dict(statuses), events, (large - small) / 2**20
    )
    assert ALLOWED == statuses[200]
    # a service first limits the requests of an address (429)
    assert {503} <= set(statuses) - {200} <= ({503} if server.kind == "train" else {503, 429})
    assert {True} == with_retry
    assert large - small < LARGER_BY
    assert ALLOWED == asyncio.run(places(server))
    server.until_steps(1)


async def places(server: Open) -> int:
    """How many new readers are served, all at the same time, once quiet streams were noticed to
    have no reader.
    """
    async with (
        aiohttp.ClientSession(headers=server.headers) as session,
        asyncio.timeout(PATIENCE_S),
    ):
        answers: list[aiohttp.ClientResponse] = []
        while len(answers) < ALLOWED:
            answer = await session.get(f"{server.address}/api/v1/runs/{server.run}/events")
            if answer.status == 200:
                answers.append(answer)
            else:
                answer.close()
                await asyncio.sleep(0.1)
        found = len(answers)
        for answer in answers:
            answer.close()
        return found
