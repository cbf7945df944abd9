"""`Relay`: the event stream of a run, read once for all its readers at the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tianflow.logs import logger, report_death
from tianflow.rundir.control_file import ControlFile
from tianflow.server.common.event_buffer import EventBuffer
from tianflow.server.service import run_client
from tianflow.server.service.run_client import NoAnswerError, RunClient

log = logger("service")

END = b"\n\n"
LONGEST = 8 * 2**20
"""Maximum bytes of one event; a run that exceeds them counts as disconnected."""


@dataclass(frozen=True, slots=True)
class RelayedEvent:
    """An event as the run encoded it."""

    number: int
    text: bytes


class Relay(EventBuffer):
    """The events of a run, with the numbers of the run's own feed.

    Args:
        client: of runs.
        contact: of the run.
    """

    def __init__(self, *, client: RunClient, contact: ControlFile) -> None:
        super().__init__()
        self._client, self._contact = client, contact
        self.readers = 0
        """Number of readers."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the relay holds all events that the run retains; `NoAnswerError` if the run
        does not answer.
        """
        self.task = asyncio.create_task(self._run(), name=f"relay {contact.run}")
        report_death(self.task, log, "events of a run are no longer relayed", run=contact.run)

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(run_client.ANSWER_S):
                await self._read(follow=False)
            self.ready.set_result(None)
            await self._read(follow=True)
        except (NoAnswerError, TimeoutError, ValueError) as error:
            if not self.ready.done():
                self.ready.set_exception(NoAnswerError(str(error) or "it does not answer in time"))
        finally:
            self.ready.cancel()
            self.close()

    async def _read(self, *, follow: bool) -> None:
        pending = b""  # of this connection only; the next one repeats an incomplete event
        async with self._client.events(self._contact, self.newest, follow=follow) as chunks:
            async for chunk in chunks:
                *whole, pending = (pending + chunk).split(END)
                for block in whole:
                    self._take(block + END)
                if len(pending) > LONGEST:
                    raise NoAnswerError(f"it sent an event of more than {LONGEST} bytes")

    def _take(self, block: bytes) -> None:
        """Add an event, and ignore comments. An initial ``lost`` event is evicted by the events
        after it, which fill the buffer.
        """
        head, _, _ = block.partition(b"\n")
        if head.startswith(b"id: ") and (number := int(head[4:])) > self.newest:
            self.add(RelayedEvent(number, block))


class Relays:
    """One relay for each run with readers.

    Args:
        client: of runs.
    """

    def __init__(self, *, client: RunClient) -> None:
        self._client = client
        self._relays: dict[ControlFile, Relay] = {}

    @asynccontextmanager
    async def reading(self, contact: ControlFile) -> AsyncIterator[Relay]:
        """The relay of a run, with all events that the run retains.

        Raises:
            NoAnswerError: the run does not answer.
        """
        relay = self._relays.get(contact)
        if relay is None or relay.closed:
            relay = self._relays[contact] = Relay(client=self._client, contact=contact)
        relay.readers += 1
        try:
            await asyncio.shield(relay.ready)
            yield relay
        finally:
            relay.readers -= 1
            if not relay.readers:
                if self._relays.get(contact) is relay:
                    del self._relays[contact]
                relay.task.cancel()
                await asyncio.wait([relay.task])
                if not relay.task.cancelled():
                    relay.task.result()
