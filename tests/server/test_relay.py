"""Events of a run through a service: one stream of the run for any number of readers, the run's own
numbers, and released places.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.server.test_events import Door
from tests.server.test_service import CONTROL, RUNS, World, accept, until, with_a_run
from tianflow.config.model import HttpSettings
from tianflow.core.events import HostExited
from tianflow.rundir.control_file import ControlFile
from tianflow.server.common.auth import Guard, Tokens
from tianflow.server.run.server import address, bind, make_runner, serving_requests
from tianflow.server.service import run_client
from tianflow.server.service.relay import Relay, Relays
from tianflow.server.service.routes import make_app
from tianflow.server.service.run_client import NoAnswerError

EVENTS = f"{RUNS}/a/events"
EXITED = HostExited("actors-0", "killed")
MANY = 40
"""More than a run allows streams."""


world = pytest.fixture(with_a_run)


@asynccontextmanager
async def front(world: World, **http: Any) -> AsyncIterator[Door]:
    """The same service behind a server as `tianflow serve` has it, which hears of connections that
    end.
    """
    settings = HttpSettings(max_requests_per_s=10_000.0, **http)
    app = make_app(
        manager=world.manager,
        store=world.manager._store,
        client=world.manager._client,
        guard=Guard(tokens=Tokens("c", "r"), loopback=True),
        http=settings,
        allowed=(),
        check=accept,
    )
    listener = await bind(settings)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        serving_requests(make_runner(app), listener, limit=100),
        aiohttp.ClientSession(address(listener), headers=CONTROL, connector=connector) as session,
    ):
        with ExitStack() as stack:
            yield Door(session, stack)


async def numbers(response: aiohttp.ClientResponse, count: int) -> list[int]:
    """Of the next events."""
    seen: list[int] = []
    async with asyncio.timeout(10.0):
        while len(seen) < count:
            line = await response.content.readline()
            assert line, seen
            if line.startswith(b"id: "):
                seen.append(int(line[4:]))
    return seen


async def wait_for_events(world: World, count: int) -> None:
    """Publish ``count`` events of the run, and wait until its server has them."""
    run = world.process("a").run
    async with aiohttp.ClientSession() as session:
        contact = await asyncio.to_thread(lambda: world.process("a").control)
        assert contact is not None
        headers = {"Authorization": f"Bearer {contact.token}"}
        async with session.get(f"{contact.address}{EVENTS}", headers=headers) as response:
            for _ in range(count):
                run.events.publish(EXITED)
            await numbers(response, count)


async def test_a_run_sends_its_events_once_for_any_number_of_readers(world: World) -> None:
    async with front(world, max_streams=MANY) as session:
        responses = [await session.get(EVENTS) for _ in range(MANY)]
        assert {200} == {response.status for response in responses}
        world.process("a").run.events.publish(EXITED)
        assert [[1]] * MANY == [await numbers(response, 1) for response in responses]
        assert 1 == sum(task.get_name() == "relay a" for task in asyncio.all_tasks())
        for response in responses:
            response.close()

        async def nobody() -> bool:
            return "relay a" not in {task.get_name() for task in asyncio.all_tasks()}

        await until(nobody)


async def test_numbers_are_those_of_the_run_and_a_reader_resumes(
    world: World,
) -> None:
    await wait_for_events(world, 5)
    async with front(world) as session:
        assert [4, 5] == await numbers(await session.get(EVENTS, headers={"Last-Event-ID": "3"}), 2)
        fresh = await session.get(EVENTS)
        world.process("a").run.events.publish(EXITED)
        assert [6] == await numbers(fresh, 1), "without a number, only what is to come"
        whole = await (await session.get(f"{EVENTS}?follow=false")).text()
        assert [1, 2, 3, 4, 5, 6] == [
            int(line[4:]) for line in whole.splitlines() if line.startswith("id: ")
        ]
        assert 400 == (await session.get(f"{EVENTS}?follow=yes")).status


async def test_evicted_events_of_the_run_are_reported_as_lost_with_the_count(world: World) -> None:
    await wait_for_events(world, 600)
    await wait_for_events(world, 600)
    async with front(world) as session:
        for _ in range(2):  # with a new relay each time
            text = await (
                await session.get(f"{EVENTS}?follow=false", headers={"Last-Event-ID": "100"})
            ).text()
            first, second, *_ = text.split("\n\n")[1:]
            assert ("id: 176", "event: lost", 76) == (
                *first.splitlines()[:2],
                json.loads(first.splitlines()[2][6:])["count"],
            )
            assert second.startswith("id: 177\n")


async def test_a_disconnect_from_a_quiet_stream_releases_its_place_at_once(
    world: World,
) -> None:
    async with front(world, max_streams=1) as session:
        first = await session.get(EVENTS)
        assert 503 == (await session.get(EVENTS)).status
        first.close()

        async def free() -> bool:
            response = await session.get(EVENTS)
            response.close()
            return response.status == 200

        await until(free)  # within less than a heartbeat


async def test_a_relay_of_a_run_that_does_not_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_client, "ANSWER_S", 0.2)
    async with run_client.RunClient() as client:
        relays = Relays(client=client)
        nobody = ControlFile(
            run="a", pid=1, start_time=0, address="http://127.0.0.1:9", token="t", read_token="r"
        )
        with pytest.raises(NoAnswerError):
            async with relays.reading(nobody):
                pytest.fail("it has told nothing")


class Telling:
    """A run that sends the next of ``texts`` on each connection, byte by byte."""

    def __init__(self, *texts: bytes) -> None:
        self.texts = list(texts)

    @asynccontextmanager
    async def events(
        self, contact: Any, number: int, *, follow: bool
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        text = self.texts.pop(0)

        async def pieces() -> AsyncIterator[bytes]:
            for byte in text:
                yield bytes([byte])

        yield pieces()

    async def frames(self) -> tuple[int, list[bytes]]:
        """The events in a relay of it, and the number of lost ones."""
        relay = Relay(
            client=self,
            contact=ControlFile(run="a", pid=1, start_time=0, address="", token="", read_token=""),
        )  # type: ignore[arg-type]  # all it asks for
        await relay.ready
        await relay.task
        assert relay.closed
        lost, frames = relay.since(0, 10)
        return lost, [frame.text for frame in frames]


async def test_events_in_pieces_are_joined_and_comments_ignored() -> None:
    text = b"retry: 1\n\n:\n\nid: 7\nevent: x\ndata: {}\n\nid: 9\nevent: y\ndata: {}\n\n"
    assert (
        6,
        [b"id: 7\nevent: x\ndata: {}\n\n", b"id: 9\nevent: y\ndata: {}\n\n"],
    ) == await Telling(text, text).frames()


async def test_an_event_cut_off_by_a_broken_connection_is_read_from_the_next_one() -> None:
    torn, whole = (
        b"retry: 1\n\nid: 1\nevent: x\ndata: {",
        b"retry: 1\n\nid: 1\nevent: x\ndata: {}\n\n",
    )
    assert (0, [b"id: 1\nevent: x\ndata: {}\n\n"]) == await Telling(torn, whole).frames()
