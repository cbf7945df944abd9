"""Both servers refuse what is too large, too slow, not meant for them, or not allowed: in bounded
time, and as designed.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.fakes_run import FakeRun
from tianflow.config.model import HttpSettings
from tianflow.errors import ConfigError, Problem
from tianflow.server.common import bodies, connections, problems
from tianflow.server.common.auth import Tokens
from tianflow.server.run import server
from tianflow.server.run.app import MAX_BODY
from tianflow.server.service.service import ServiceSettings, serving

WITHIN_S = 10.0
MB100 = 100 * 2**20


@dataclass(frozen=True)
class Door:
    """A server, with a path that accepts a body by ``method``."""

    port: int
    tokens: Tokens
    method: str
    path: str
    content_type: str

    def head(self, method: str | None = None, path: str | None = None, **headers: str) -> bytes:
        """A request's head. A header called ``a_b`` is ``a-b``; an empty value leaves it out."""
        given = {
            "Host": f"127.0.0.1:{self.port}",
            "Content-Type": self.content_type,
            "Authorization": f"Bearer {self.tokens.control}",
        }
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{name}: {value}" for name, value in given.items() if value]
        return "\r\n".join(
            [f"{method or self.method} {path or self.path} HTTP/1.1", *lines, "", ""]
        ).encode()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def ask(self, data: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the answer to ``data``, which need not be a whole request."""
        async with self.connected() as (reader, writer):
            writer.write(data)
            return await answer(reader)


async def answer(reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str], bytes]:
    async with asyncio.timeout(WITHIN_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {
            name.lower(): value for name, value in re.findall(r"(?m)^([\w-]+): (.*?)\r$", head)
        }
        return (
            int(head.split(" ", 2)[1]),
            headers,
            await reader.readexactly(int(headers.get("content-length", "0"))),
        )


@asynccontextmanager
async def dripping(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """A byte now and then, as long as the context is open."""

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.02)

    task = asyncio.create_task(drip())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def problem_of(found: tuple[int, Mapping[str, str], bytes], status: int) -> dict[str, Any]:
    """The problem document of an answer with ``status``."""
    assert status == found[0], found
    assert found[1]["content-type"].startswith("application/problem+json")
    document: dict[str, Any] = json.loads(found[2])
    assert status == document["status"]
    assert b"Traceback" not in found[2]
    return document


@asynccontextmanager
async def opened(kind: str, directory: Path, **more: Any) -> AsyncIterator[Door]:
    """The server beside a run (``train``), or that of many (``serve``)."""
    http = HttpSettings(max_requests_per_s=1000.0, **more)
    if kind == "train":
        tokens = Tokens.make()
        run = await asyncio.to_thread(FakeRun)  # it reads the installed entry points
        async with server.serve(run, http, tokens, directory) as train:
            yield Door(
                train.port,
                tokens,
                "PATCH",
                "/api/v1/runs/fake/balance",
                "application/merge-patch+json",
            )
    else:
        async with serving(ServiceSettings(runs_dir=directory, http=http, limit=1)) as service:
            yield Door(
                service.server.port, service.tokens, "POST", "/api/v1/runs", "application/json"
            )


@pytest.fixture(params=["train", "serve"])
async def door(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Door]:
    async with opened(request.param, tmp_path) as door:
        yield door


# Bodies
# --------------------------------------------------------------------------------------------------


async def test_a_body_announced_as_too_large_is_refused_unread(door: Door) -> None:
    problem_of(await door.ask(door.head(Content_Length=str(MB100))), 413)


async def test_a_body_without_end_is_refused_once_it_is_too_large(door: Door) -> None:
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    problem_of(
        await door.ask(door.head(Transfer_Encoding="chunked") + chunk * (MAX_BODY // 4096 + 1)), 413
    )


async def test_a_body_that_grows_when_unpacked_is_refused(door: Door) -> None:
    packed = gzip.compress(b" " * (MAX_BODY + 1))
    assert len(packed) < 1000
    problem_of(
        await door.ask(
            door.head(Content_Encoding="gzip", Content_Length=str(len(packed))) + packed
        ),
        413,
    )


@pytest.mark.parametrize("kind", ["train", "serve"])
async def test_a_slow_body_is_408_and_closes_the_connection(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.2)
    monkeypatch.setattr(server, "LINGER_S", 0.2)
    async with opened(kind, tmp_path) as door, door.connected() as (reader, writer):
        writer.write(door.head(Content_Length="10000"))
        async with dripping(writer), asyncio.timeout(WITHIN_S):
            found = await answer(reader)
            assert "within 0.2 seconds" in problem_of(found, 408)["detail"]
            assert "close" == found[1]["connection"].lower()
            with suppress(ConnectionResetError):  # what dripped in after the end
                assert b"" == await reader.read()


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        ({"Transfer_Encoding": "chunked"}, b"zz\r\nno chunk\r\n\r\n"),
        ({"Content_Encoding": "gzip", "Content_Length": "8"}, b"not gzip"),
        ({"Content_Length": "many"}, b""),
        ({"Content_Length": "3", "Transfer_Encoding": "chunked"}, b"0\r\n\r\n"),
    ],
)
async def test_an_unreadable_body_is_400_and_logs_nothing(
    door: Door, headers: dict[str, str], data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert 400 == (await door.ask(door.head(**headers) + data))[0]
    assert [] == [record for record in caplog.records if record.exc_info]


async def test_a_disconnect_within_a_body_is_not_an_unexpected_error(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    async with door.connected() as (_, writer):
        writer.write(door.head(Content_Length="1000") + b"{")
        await writer.drain()
    async with asyncio.timeout(WITHIN_S):
        while (  # noqa: ASYNC110 - asked over HTTP
            'code="400"'
            not in (await door.ask(door.head("GET", "/metrics", Content_Type="")))[2].decode()
        ):
            await asyncio.sleep(0.01)
    assert [] == [record for record in caplog.records if record.exc_info]


async def test_a_request_without_a_token_is_refused_before_its_body_is_read(door: Door) -> None:
    problem_of(await door.ask(door.head(Authorization="", Content_Length="1000")), 401)


# Heads
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endless",
    [b"X-Long: " + b"x" * 2**16, b"".join(b"X-%d: y\r\n" % number for number in range(10_000))],
)
async def test_endless_headers_are_400_and_log_nothing(
    door: Door, endless: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    found = await door.ask(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + endless)
    assert 400 == found[0]
    assert b"Traceback" not in found[2]
    assert [] == [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("kind", ["train", "serve"])
@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_a_connection_without_a_whole_request_is_closed(
    kind: str, sent: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    async with (
        opened(kind, tmp_path) as door,
        door.connected() as (reader, writer),
        asyncio.timeout(WITHIN_S),
    ):
        writer.write(sent)
        async with dripping(writer) if sent else nullcontext():
            with suppress(ConnectionResetError):  # what dripped in after the end
                assert b"" == await reader.read()


# How many
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "serve"])
async def test_a_connection_above_the_limit_is_503_and_a_released_place_is_reused(
    kind: str, tmp_path: Path
) -> None:
    async with (
        opened(kind, tmp_path, max_connections=2, max_streams=1) as door,
        AsyncExitStack() as stack,
    ):
        idle = [
            await stack.enter_async_context(door.connected()) for _ in range(3)
        ]  # the one of a stream may be used for anything
        for data in (b"", door.head("GET", "/livez")):
            found = await door.ask(data)
            assert "limit of 3 connections" in problem_of(found, 503)["detail"]
            assert ("5", "close", "no-store") == tuple(
                found[1][name] for name in ("retry-after", "connection", "cache-control")
            )
        _, leaving = idle[0]
        leaving.close()
        async with asyncio.timeout(WITHIN_S):
            while (await door.ask(door.head("GET", "/livez")))[0] == 503:  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.01)


async def test_refused_clients_that_stay_connected_are_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REFUSED_S", 0.1)
    monkeypatch.setattr(connections, "MAX_REFUSED", 2)
    async with (
        opened("train", tmp_path, max_connections=1, max_streams=0) as door,
        AsyncExitStack() as stack,
    ):
        await stack.enter_async_context(door.connected())
        refused = [await stack.enter_async_context(door.connected()) for _ in range(3)]
        async with asyncio.timeout(WITHIN_S), dripping(refused[0][1]):
            answers = [await said(reader) for reader, _ in refused]
        assert [True, True, False] == [b"503" in answer for answer in answers]


def test_the_limits_hold_on_uvloop_too(tmp_path: Path) -> None:
    """uvloop: transports are of other types there."""

    async def refused_and_heard_of() -> None:
        async with (
            opened("train", tmp_path, max_connections=1, max_streams=1) as door,
            door.connected() as (reader, writer),
        ):
            writer.write(door.head("GET", "/api/v1/runs/fake/events"))
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            async with door.connected():
                problem_of(await door.ask(b""), 503)
            problem_of(await door.ask(door.head("GET", "/api/v1/runs/fake/events")), 503)
            writer.close()
            async with asyncio.timeout(WITHIN_S):  # less than a heartbeat
                while True:
                    async with door.connected() as (again, asking):
                        asking.write(door.head("GET", "/api/v1/runs/fake/events"))
                        if b"200 OK" in await again.readuntil(b"\r\n\r\n"):
                            return

    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(refused_and_heard_of())


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_accepted_just_before_the_end_is_closed_too(turns: int) -> None:
    """Some turns of the loop after it has come, a connection is accepted and not made yet."""
    listener = await server.bind(HttpSettings())
    with socket.socket() as caller, listener:
        caller.setblocking(False)
        async with server.serving_requests(
            server.make_runner(web.Application()), listener, limit=1
        ):
            with suppress(BlockingIOError):
                caller.connect(listener.getsockname())
            for _ in range(turns):
                await asyncio.sleep(0)
    gc.collect()  # an unclosed socket warns now, which fails this test


@pytest.mark.parametrize("limit", [0, 1])
async def test_a_closed_limiter_aborts_current_and_later_connections(limit: int) -> None:
    """Admitted or refused, with the answer still on its way."""
    limiter = connections.ConnectionLimiter(server=asyncio.Protocol, limit=limit)
    there, late, gone = Transport(), Transport(), Transport()
    for transport in (there, gone):
        transport.connect_to(limiter)
    gone.protocol.connection_lost(None)
    limiter.close()
    late.connect_to(limiter)
    assert [1, 1, 0] == [transport.aborted for transport in (there, late, gone)]
    for transport in (there, late):
        transport.protocol.connection_lost(None)
    assert (0, 0, set()) == (limiter.open, limiter.refused, limiter.transports)


class Transport(asyncio.Transport):
    """Counts how often it is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = 0

    def connect_to(self, limiter: connections.ConnectionLimiter) -> None:
        self.protocol = limiter()
        self.protocol.connection_made(self)

    def abort(self) -> None:
        self.aborted += 1

    def write(self, data: object) -> None:
        pass

    def write_eof(self) -> None:
        pass


async def said(reader: asyncio.StreamReader) -> bytes:
    """All until the connection ended, however it did."""
    received = b""
    with suppress(ConnectionResetError):
        while more := await reader.read(4096):
            received += more
    return received


# Access
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Host": "example.com"}, 421),
        ({"Host": "127.0.0.1.example.com"}, 421),
        ({"Host": "["}, 400),
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic Zm9vOmJhcg=="}, 401),
        (
            {"Authorization": "Bearer \udcff".encode("utf-8", "surrogateescape").decode("latin-1")},
            401,
        ),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_a_foreign_host_or_an_unknown_token_is_refused(
    door: Door, headers: dict[str, str], status: int, method: str
) -> None:
    path = "/api/v1/runs" if method != "POST" or door.method == "POST" else "/api/v1/runs/fake/stop"
    async with door.connected() as (reader, writer):
        writer.write(door.head(method, path, **headers, Content_Length="0"))
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)).decode()
    assert f"HTTP/1.1 {status} " == head[:13]
    assert ("WWW-Authenticate: Bearer" in head) is (status == 401)


async def test_the_read_token_allows_reading_only(door: Door) -> None:
    read = f"Bearer {door.tokens.read}"
    assert 200 == (await door.ask(door.head("GET", "/api/v1/runs", Authorization=read)))[0]
    problem_of(await door.ask(door.head(Authorization=read, Content_Length="2") + b"{}"), 403)


@pytest.mark.parametrize("kind", ["train", "serve"])
async def test_half_open_connections_give_way_to_requests(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", 0.05)
    async with (
        opened(kind, tmp_path, max_connections=3, max_streams=1) as door,
        AsyncExitStack() as stack,
    ):
        served = await stack.enter_async_context(door.connected())
        served[1].write(door.head("GET", "/livez"))
        assert b"200 OK" in await served[0].readuntil(b"\r\n\r\n")
        for _ in range(3):
            _, writer = await stack.enter_async_context(door.connected())
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        await asyncio.sleep(0.2)
        for _ in range(8):
            assert 200 == (await door.ask(door.head("GET", "/livez")))[0]
        await served[0].read(1024)
        served[1].write(door.head("GET", "/livez"))  # a connection with requests stays
        assert b"200 OK" in await served[0].readuntil(b"\r\n\r\n")


@pytest.mark.parametrize("kind", ["train", "serve"])
async def test_strangers_cannot_use_up_the_places_of_authorised_clients(
    kind: str, tmp_path: Path
) -> None:
    """A reserve: the flood is younger than any time limit, and takes every place that it can get."""
    async with (
        opened(kind, tmp_path, max_connections=20, max_streams=4) as door,
        AsyncExitStack() as stack,
    ):
        mine = await stack.enter_async_context(door.connected())
        mine[1].write(door.head("GET", "/api/v1/runs"))
        assert 200 == (await answer(mine[0]))[0]
        for number in range(60):
            _, writer = await stack.enter_async_context(door.connected())
            if number % 3 == 1:  # an answer without a token, and then silence
                writer.write(door.head("GET", "/livez", Authorization=""))
            elif number % 3 == 2:  # a wrong token
                writer.write(door.head("GET", "/api/v1/runs", Authorization="Bearer no"))
            if number % 10 == 0:
                assert 200 == (await door.ask(door.head("GET", "/api/v1/runs")))[0]
        assert 200 == (await door.ask(door.head("GET", "/api/v1/runs")))[0]
        mine[1].write(door.head("GET", "/api/v1/runs"))  # an authorised connection stays
        assert 200 == (await answer(mine[0]))[0]


@pytest.mark.parametrize("kind", ["train", "serve"])
@pytest.mark.parametrize("sent", ["nothing", "open", "wrong"])
async def test_strangers_that_were_answered_give_way_in_time(
    kind: str, sent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a reserve, after `STRANGER_S`, whatever a stranger has sent."""
    monkeypatch.setattr(connections, "STRANGER_S", 0.05)
    async with (
        opened(kind, tmp_path, max_connections=3, max_streams=0) as door,
        AsyncExitStack() as stack,
    ):
        for _ in range(3):
            reader, writer = await stack.enter_async_context(door.connected())
            if sent != "nothing":
                wrong = {"Authorization": "" if sent == "open" else "Bearer no"}
                path = "/livez" if sent == "open" else "/api/v1/runs"
                writer.write(door.head("GET", path, **wrong))
                assert (200 if sent == "open" else 401) == (await answer(reader))[0]
        await asyncio.sleep(0.1)  # longer than they may stay
        kept = []
        for _ in range(3):
            connection = await stack.enter_async_context(door.connected())
            connection[1].write(door.head("GET", "/api/v1/runs"))
            assert 200 == (await answer(connection[0]))[0]
            kept.append(connection)
        await asyncio.sleep(0.1)
        problem_of(await door.ask(door.head("GET", "/api/v1/runs")), 503)
        for reader, writer in kept:  # authorised ones never give way
            writer.write(door.head("GET", "/api/v1/runs"))
            assert 200 == (await answer(reader))[0]


async def test_a_connection_without_a_request_head_is_closed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    async with (
        opened("train", tmp_path, max_connections=2, max_streams=0) as door,
        door.connected() as (reader, writer),
        door.connected() as (served, asking),
    ):
        head = door.head("GET", "/livez")
        for byte in head:  # a head that arrives byte by byte is one, too
            asking.write(bytes([byte]))
        assert b"200 OK" in await served.readuntil(b"\r\n\r\n")
        writer.write(b"GET /livez HTTP/1.1\r\n")
        async with asyncio.timeout(WITHIN_S):
            with suppress(ConnectionError):
                assert b"" == await reader.read()
        await served.read(1024)
        asking.write(head)
        assert b"200 OK" in await served.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize("nested", [False, True])
async def test_a_change_of_many_unknown_settings_is_refused_at_once(
    tmp_path: Path, nested: bool
) -> None:
    keys = {f"max_stalenes{number}": 1 for number in range(2200)}
    data = json.dumps({"parameters": keys} if nested else keys).encode()
    async with opened("train", tmp_path) as door:
        head = door.head(Content_Length=str(len(data)))
        status, _, body = await door.ask(head + data)
        assert 422 == status
        (found,) = json.loads(body)["errors"]
        assert "at most 64 values" == found["accepted"]


async def test_an_answer_lists_a_few_dozen_problems_at_most() -> None:
    found = problems.invalid_settings(ConfigError([Problem(f"a.{n}", n, "x") for n in range(100)]))
    assert 32 == len(found.more["errors"])  # type: ignore[arg-type]  # a list
    assert "there are 68 more" in found.detail
