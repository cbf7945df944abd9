"""Events over HTTP: aggregation, resumption and access; the server never waits for a reader."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.server.test_run_server import CONTROL, READ, RUN, TOKENS, problem
from tests.support.fakes_run import FakeRun
from tianflow.channels.broadcast import Broadcast
from tianflow.config.model import HttpSettings
from tianflow.core.events import (
    EnvironmentFailed,
    EpisodesFinished,
    EvaluationFinished,
    Event,
    HostExited,
    SettingsChanged,
    UpdateFinished,
)
from tianflow.observability.rates import RunRates
from tianflow.server.common import broadcaster, event_feed, sse
from tianflow.server.common.auth import NO_TOKENS, Guard
from tianflow.server.common.event_feed import AGGREGATE_S, LONGEST_TEXT, Feed
from tianflow.server.common.problems import Handler
from tianflow.server.common.throttle import ADDRESSES, Throttle
from tianflow.server.run.app import ServedRun, make_app
from tianflow.server.run.server import Server, serve

EVENTS = f"{RUN}/events"
EXITED = HostExited("actors-0", "killed")
Seen = tuple[int, str, dict[str, Any]]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broadcast() -> Broadcast:
    return Broadcast()


@pytest.fixture
def feed(broadcast: Broadcast, clock: Clock) -> Feed:
    return Feed(events=broadcast, clock=clock, capacity=8)


def events_of(feed: Feed, since: int = 0) -> list[tuple[str, dict[str, Any]]]:
    feed.poll()
    return [(event.kind, dict(event.data)) for event in feed.since(since, 100)[1]]


# Feed
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (UpdateFinished(1, 0.1, 64), "update-finished"),
        (EpisodesFinished("actor-0", (1.0,), (10,)), "episodes-finished"),
        (EnvironmentFailed("actor-0", "raised", "no"), "environment-failed"),
        (EvaluationFinished(1, 1, 1.0, (1.0,)), "evaluation-finished"),
        (EXITED, "host-exited"),
        (SettingsChanged(2, ("balance.credits",)), "settings-changed"),
    ],
)
def test_every_event_is_published_under_its_kind(
    feed: Feed, broadcast: Broadcast, event: Event, kind: str
) -> None:
    broadcast.publish(event)
    assert [kind] == [name for name, _ in events_of(feed)]


def test_a_published_event_holds_its_data_and_its_time(feed: Feed, broadcast: Broadcast) -> None:
    broadcast.publish(EvaluationFinished(7, 2, float("nan"), (1.0, 3.0), metrics={"a": 0.5}))
    assert [
        (
            "evaluation-finished",
            {
                "at": 1000.0,
                "version": 7,
                "episodes": 2,
                "mean_return": None,
                "returns": [1.0, 3.0],
                "name": "main",
                "metrics": {"a": 0.5},
            },
        )
    ] == events_of(feed)


def test_updates_are_aggregated_a_few_times_a_second_and_all_are_counted(
    feed: Feed, broadcast: Broadcast, clock: Clock
) -> None:
    counted: list[Mapping[str, Any]] = []
    for number in range(1, 1001):  # ten seconds of 100 updates a second, looked at after each
        broadcast.publish(UpdateFinished(number, 0.01, 64, {"loss": float(number)}))
        feed.poll()
        clock.now += 0.01
        if feed.newest > len(counted):
            counted.append(feed.since(feed.newest - 1, 1)[1][0].data)
    assert 1.0 / AGGREGATE_S * 10 - 3 <= len(counted) <= 1.0 / AGGREGATE_S * 10 + 1
    feed.poll(last=True)
    counted.append(feed.since(feed.newest - 1, 1)[1][0].data)
    assert 1000 == sum(data["count"] for data in counted)
    assert 64_000 == sum(data["samples"] for data in counted)
    assert 10.0 == pytest.approx(sum(data["seconds"] for data in counted))
    assert (1000, {"loss": 1000.0}) == (counted[-1]["version"], counted[-1]["statistics"])
    assert 1 == counted[0]["count"], "the first one after a silence is told at once"


def test_episodes_are_aggregated_with_their_range(
    feed: Feed, broadcast: Broadcast, clock: Clock
) -> None:
    broadcast.publish(EpisodesFinished("actor-0", (5.0,), (50,)))
    feed.poll()
    broadcast.publish(EpisodesFinished("actor-0", (1.0, 2.0), (10, 20)))
    broadcast.publish(EpisodesFinished("actor-1", (6.0,), (60,)))
    broadcast.publish(EpisodesFinished("actor-1", (), ()))
    assert [] == events_of(feed, since=1)
    clock.now += AGGREGATE_S
    expected = {
        "at": clock.now,
        "count": 3,
        "mean_return": 3.0,
        "min_return": 1.0,
        "max_return": 6.0,
        "mean_length": 30.0,
    }
    assert [("episodes-finished", expected)] == events_of(feed, since=1)


def test_other_events_are_published_one_by_one(feed: Feed, broadcast: Broadcast) -> None:
    for _ in range(3):
        broadcast.publish(EXITED)
    assert ["host-exited"] * 3 == [kind for kind, _ in events_of(feed)]


def test_a_clock_set_back_stops_no_events(feed: Feed, broadcast: Broadcast, clock: Clock) -> None:
    for _ in range(2):
        broadcast.publish(UpdateFinished(1, 0.1, 64))
        feed.poll()
        clock.now -= 3600.0
    assert 2 == feed.newest


def test_a_long_text_is_cut(feed: Feed, broadcast: Broadcast) -> None:
    broadcast.publish(EnvironmentFailed("actor-0", "raised", "x" * 100_000))
    assert "x" * LONGEST_TEXT == events_of(feed)[0][1]["message"]


def test_the_newest_are_retained_and_the_others_counted(feed: Feed, broadcast: Broadcast) -> None:
    for _ in range(20):
        broadcast.publish(EXITED)
    feed.poll()
    assert (12, list(range(13, 21))) == numbers(feed, 0)
    assert (0, list(range(16, 21))) == numbers(feed, 15)
    assert (0, [16, 17]) == numbers(feed, 15, at_most=2)
    assert (0, []) == numbers(feed, 20)


def numbers(feed: Feed, since: int, at_most: int = 100) -> tuple[int, list[int]]:
    lost, events = feed.since(since, at_most)
    return lost, [event.number for event in events]


def test_events_too_fast_for_the_feed_are_reported_as_lost(
    feed: Feed, broadcast: Broadcast
) -> None:
    for _ in range(1024 + 5):
        broadcast.publish(EXITED)
    feed.poll()
    assert ("lost", 5) == (events_of(feed)[-1][0], events_of(feed)[-1][1]["count"])
    newest = feed.newest
    feed.poll()
    assert newest == feed.newest, "the same loss is told once"


async def test_a_feed_publishes_its_remaining_events_at_the_end(
    feed: Feed, broadcast: Broadcast
) -> None:
    going = asyncio.create_task(feed.run(lambda: None))
    await asyncio.sleep(0)
    broadcast.publish(UpdateFinished(1, 0.1, 64))
    feed.poll()
    for number in range(2, 5):
        broadcast.publish(UpdateFinished(number, 0.1, 64))
    going.cancel()
    await asyncio.wait([going])
    assert feed.closed
    assert [1, 3] == [event.data["count"] for event in feed.since(0, 2)[1]]
    dropped = broadcast.dropped
    for _ in range(2000):
        broadcast.publish(EXITED)
    assert dropped == broadcast.dropped, "it no longer reads"


# Streams
# --------------------------------------------------------------------------------------------------


class Door:
    """A client whose answers are closed when the test is done with the server."""

    def __init__(self, session: aiohttp.ClientSession, stack: ExitStack) -> None:
        self._session, self._stack = session, stack

    async def get(self, path: str, **more: Any) -> aiohttp.ClientResponse:
        response = await self._session.get(path, **more)
        self._stack.callback(response.close)
        return response


@asynccontextmanager
async def serving(run: FakeRun, directory: Path, **http: Any) -> AsyncIterator[tuple[Server, Door]]:
    async with (
        serve(run, HttpSettings(**http), TOKENS, directory) as server,
        aiohttp.ClientSession(server.address, headers=READ) as session,
    ):
        with ExitStack() as stack:
            yield server, Door(session, stack)


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()


async def read(response: aiohttp.ClientResponse, count: int | None = None) -> list[Seen]:
    """The next ``count`` events; without a count all until the end."""
    seen: list[Seen] = []
    fields: dict[str, str] = {}
    while count is None or len(seen) < count:
        line = (await response.content.readline()).decode()
        if not line:
            break
        name, _, value = line.rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            seen.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
            fields = {}
    return seen


async def settled(run: FakeRun, count: int, door: Door) -> None:
    """Publish ``count`` events, and wait until they can be read."""
    response = await door.get(EVENTS)
    for _ in range(count):
        run.events.publish(EXITED)
    assert count == len(await read(response, count))
    response.close()


async def test_a_stream_sends_events_as_they_happen(run: FakeRun, tmp_path: Path) -> None:
    async with serving(run, tmp_path) as (_, door):
        response = await door.get(EVENTS)
        assert ("text/event-stream", "no-store") == (
            response.content_type,
            response.headers["Cache-Control"],
        )
        assert b"retry: 1000\n" == await response.content.readline()
        run.events.publish(EXITED)
        run.events.publish(SettingsChanged(2, ("balance.credits",)))
        (first, kind, data), (second, other, _) = await read(response, 2)
        assert (1, "host-exited", "killed") == (first, kind, data["reason"])
        assert (2, "settings-changed") == (second, other)


async def test_a_reader_resumes_after_its_last_event(run: FakeRun, tmp_path: Path) -> None:
    async with serving(run, tmp_path) as (_, door):
        await settled(run, 5, door)
        response = await door.get(EVENTS, headers={"Last-Event-ID": "3"})
        assert [4, 5] == [number for number, _, _ in await read(response, 2)]
        fresh = await door.get(EVENTS)
        run.events.publish(EXITED)
        assert [6] == [number for number, _, _ in await read(fresh, 1)], (
            "without a number, only what is to come"
        )


async def test_without_following_the_retained_events_are_sent_and_the_stream_ends(
    run: FakeRun, tmp_path: Path
) -> None:
    async with serving(run, tmp_path) as (_, door):
        await settled(run, 200, door)
        async with asyncio.timeout(5.0):
            seen = await read(await door.get(f"{EVENTS}?follow=false"))
        assert list(range(1, 201)) == [number for number, _, _ in seen]


async def test_evicted_events_are_reported_as_lost_with_the_count(
    run: FakeRun, tmp_path: Path
) -> None:
    async with serving(run, tmp_path) as (_, door):
        await settled(run, 600, door)
        await settled(run, 600, door)
        seen = await read(
            await door.get(f"{EVENTS}?follow=false", headers={"Last-Event-ID": "100"})
        )
        assert (176 - 100, "lost", 76) == (seen[0][0] - 100, seen[0][1], seen[0][2]["count"])
        assert list(range(177, 1201)) == [number for number, _, _ in seen[1:]], (
            "a number for everything else"
        )


async def test_a_number_of_an_earlier_server_says_that_some_may_be_lost(
    run: FakeRun, tmp_path: Path
) -> None:
    async with serving(run, tmp_path) as (_, door):
        await settled(run, 2, door)
        seen = await read(
            await door.get(f"{EVENTS}?follow=false", headers={"Last-Event-ID": "900"})
        )
        assert [(0, "lost"), (1, "host-exited"), (2, "host-exited")] == [
            (number, kind) for number, kind, _ in seen
        ]
        assert seen[0][2]["count"] is None


@pytest.mark.parametrize("given", ["x", "-1", "1.0", "9" * 19, "१"])
async def test_an_invalid_number_is_400(run: FakeRun, tmp_path: Path, given: str) -> None:
    async with serving(run, tmp_path) as (_, door):
        await problem(await door.get(EVENTS, headers={"Last-Event-ID": given}), 400)


async def test_follow_is_true_or_false(run: FakeRun, tmp_path: Path) -> None:
    async with serving(run, tmp_path) as (_, door):
        await problem(await door.get(f"{EVENTS}?follow=yes"), 400)


async def test_silence_is_broken_by_comments(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "HEARTBEAT_S", 0.01)
    async with serving(run, tmp_path) as (_, door):
        response = await door.get(EVENTS)
        lines = [await response.content.readline() for _ in range(6)]
        assert [b"retry: 1000\n", b"\n", b":\n", b"\n", b":\n", b"\n"] == lines


async def test_streams_are_limited_and_a_disconnect_releases_a_place_at_once(
    run: FakeRun, tmp_path: Path
) -> None:
    async with serving(run, tmp_path, max_streams=2) as (_, door):
        first, second = await door.get(EVENTS), await door.get(EVENTS)
        response = await door.get(EVENTS)
        assert "5" == response.headers["Retry-After"]
        assert "/problems/too-many-streams" == (await problem(response, 503))["type"]
        first.close()

        async def opened() -> bool:
            again = await door.get(EVENTS)
            again.close()
            return again.status == 200

        await until(opened)
        run.events.publish(EXITED)
        assert "host-exited" == (await read(second, 1))[0][1]


async def test_an_event_is_encoded_once_for_all_readers_and_written_by_one_task(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[object] = []

    def dumps(data: object, **options: Any) -> str:
        encoded.append(data)
        return json.dumps(data, **options)

    monkeypatch.setattr(event_feed, "json", SimpleNamespace(dumps=dumps))
    async with serving(run, tmp_path) as (_, door):
        responses = [await door.get(EVENTS) for _ in range(8)]
        for count in (1, 2):
            run.events.publish(EXITED)
            assert [count] * 8 == [(await read(response, 1))[0][0] for response in responses]
            assert count == len(encoded)
        for _ in range(3):
            assert 2 == len(await read(await door.get(f"{EVENTS}?follow=false")))
        assert 2 == len(encoded), "for those that come later, too"
        assert 1 == sum(task.get_name() == "broadcaster" for task in asyncio.all_tasks())


async def until(true: Callable[[], Any]) -> None:
    """Until ``true`` answers so; a test that waits in vain fails."""
    async with asyncio.timeout(5.0):
        while not await true():  # noqa: ASYNC110 - asked over HTTP: there is nothing to wait for
            await asyncio.sleep(0.01)


async def test_events_need_a_token_and_no_other_method_reads_them(
    run: FakeRun, tmp_path: Path
) -> None:
    async with (
        serve(run, HttpSettings(), TOKENS, tmp_path) as server,
        aiohttp.ClientSession(server.address) as session,
    ):
        await problem(await session.get(EVENTS), 401)
        assert 405 == (await session.head(EVENTS, headers=CONTROL)).status
        await problem(await session.post(EVENTS, headers=CONTROL), 405)


def deaf(server: Server) -> socket.socket:
    """A reader that asks for events and never reads."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", server.port))
    reader.sendall(
        f"GET {EVENTS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer read-token\r\n\r\n".encode()
    )
    return reader


BIG = EvaluationFinished(1, 1000, 1.0, tuple(float(number) for number in range(1000)))


@pytest.mark.e2e
async def test_a_reader_that_does_not_read_delays_no_other_and_is_disconnected(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "WRITE_S", 0.2)
    async with serving(run, tmp_path, max_streams=2) as (server, door):
        reader = deaf(server)
        try:
            good = await door.get(EVENTS)

            async def full() -> bool:
                response = await door.get(EVENTS)
                response.close()
                return response.status == 503

            await until(full)
            for number in range(1000):  # far more than sockets and buffers hold
                run.events.publish(BIG)
                if number % 100 == 99:
                    assert 100 == len(
                        [
                            kind
                            for _, kind, _ in await read(good, 100)
                            if kind == "evaluation-finished"
                        ]
                    )
            assert 0 == run.events.dropped

            async def free() -> bool:
                return not await full()

            await until(free)
            reader.setblocking(False)
            received = b""
            async with asyncio.timeout(5.0):
                while more := await asyncio.get_running_loop().sock_recv(reader, 2**20):
                    received += more
            assert not received.endswith(b"0\r\n\r\n"), "what was still to be sent is let go, too"
        finally:
            reader.close()


async def test_open_streams_end_with_the_server_after_the_last_events(
    run: FakeRun, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    session = aiohttp.ClientSession(headers=READ)
    async with session:
        async with serve(run, HttpSettings(), TOKENS, tmp_path) as server:
            responses = [await session.get(f"{server.address}{EVENTS}") for _ in range(8)]
            reader = deaf(server)
            run.events.publish(UpdateFinished(1, 0.1, 64))
            run.events.publish(EXITED)
            began = loop.time()
        assert loop.time() - began < 0.5
        for response in responses:
            assert {"host-exited", "update-finished"} == {
                kind for _, kind, _ in await read(response)
            }
        reader.close()


@pytest.mark.e2e
async def test_a_stuck_reader_does_not_keep_the_server_from_ending(
    run: FakeRun, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    async with serving(run, tmp_path) as (server, door):
        reader = deaf(server)
        good = await door.get(EVENTS)
        for _ in range(10):
            for _ in range(100):
                run.events.publish(BIG)
            await read(good, 100)
        good.close()
        began = loop.time()
    assert loop.time() - began < 2.0
    reader.close()


# How often
# --------------------------------------------------------------------------------------------------


async def test_requests_of_one_address_are_limited(run: FakeRun, tmp_path: Path) -> None:
    async with serving(run, tmp_path, max_requests_per_s=3.0) as (_, door):
        answers = [await door.get("/livez") for _ in range(4)]
        assert [200, 200, 200, 429] == [answer.status for answer in answers]
        assert "1" == answers[-1].headers["Retry-After"]
        assert "max_requests_per_s" in (await problem(answers[-1], 429))["detail"]


async def test_guesses_at_a_token_are_limited_too(run: FakeRun, tmp_path: Path) -> None:
    async with serving(run, tmp_path, max_requests_per_s=2.0) as (_, door):
        guess = {"Authorization": "Bearer guess"}
        assert [401, 401, 429] == [(await door.get(RUN, headers=guess)).status for _ in range(3)]


def test_a_bucket_fills_steadily_up_to_a_second_and_each_address_has_its_own(clock: Clock) -> None:
    throttle = Throttle(per_s=2.0, clock=clock)
    assert [0.0, 0.0, 0.5] == [throttle.take("a") for _ in range(3)]
    assert 0.0 == throttle.take("b")
    clock.now += 0.5
    assert [0.0, 0.5] == [throttle.take("a") for _ in range(2)]
    clock.now += 3600.0
    assert [0.0, 0.0, 0.5] == [throttle.take("a") for _ in range(3)]


def test_less_than_one_request_a_second_still_lets_one_through(clock: Clock) -> None:
    throttle = Throttle(per_s=0.1, clock=clock)
    assert [0.0, pytest.approx(10.0)] == [throttle.take("a") for _ in range(2)]


def test_the_number_of_remembered_addresses_is_limited(clock: Clock) -> None:
    throttle = Throttle(per_s=1.0, clock=clock)
    for number in range(10 * ADDRESSES):
        throttle.take(str(number))
    assert ADDRESSES == len(throttle._buckets)


@pytest.mark.parametrize("follow", ["true", "false"])
async def test_a_disconnect_before_the_first_byte_is_not_an_unexpected_error(
    run: FakeRun, follow: str, caplog: pytest.LogCaptureFixture
) -> None:
    @web.middleware
    async def leave(request: web.Request, handler: Handler) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return await handler(request)

    served = ServedRun(run, RunRates(read=run.statistics), Feed(events=run.events, clock=time.time))
    app = make_app(
        runs={run.id: served}, guard=Guard(tokens=NO_TOKENS, loopback=True), http=HttpSettings()
    )
    app.middlewares.append(leave)
    async with TestClient(TestServer(app)) as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(f"{EVENTS}?follow={follow}")
    assert "a request failed" not in caplog.text
