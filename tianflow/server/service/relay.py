"""a run's stream → `Relay` → readers of the service: a run tells its events once, however many read
them here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tianflow.rundir.control_file import ControlFile
from tianflow.server.common.event_buffer import EventBuffer
from tianflow.server.service import run_client
from tianflow.server.service.run_client import NoAnswerError, RunClient

END = b"\n\n"
LONGEST = 8 * 2**20
"""Bytes of one event; a run that tells more at once is taken for one that is gone."""


@dataclass(frozen=True, slots=True)
class RelayedEvent:
    """An event as the run wrote it."""

    number: int
    text: bytes


class Relay(EventBuffer):
    """The events of a run, under the numbers that the run's own event feed gives them.

    Args:
        asker: asks the run.
        contact: where it answers.
    """

    def __init__(self, *, client: RunClient, contact: ControlFile) -> None:
        super().__init__()
        self._client, self._contact = client, contact
        self.readers = 0
        """Those that want what comes."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once what the run keeps is kept here, too. Raises `NoAnswerError` for a run that
        does not tell.
        """
        self.task = asyncio.create_task(self._run(), name=f"relay {contact.run}")

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(run_client.ANSWER_S):
                await self._read(follow=False)
            self.ready.set_result(None)
            await self._read(follow=True)
        except (NoAnswerError, TimeoutError, ValueError) as error:
            if not self.ready.done():
                self.ready.set_exception(NoAnswerError(str(error) or "it takes too long"))
        finally:
            self.ready.cancel()
            self.close()

    async def _read(self, *, follow: bool) -> None:
        pending = (
            b""  # of this connection only: what one that broke has begun, the next one tells anew
        )
        async with self._client.events(self._contact, self.newest, follow=follow) as chunks:
            async for chunk in chunks:
                *whole, pending = (pending + chunk).split(END)
                for block in whole:
                    self._take(block + END)
                if len(pending) > LONGEST:
                    raise NoAnswerError("it tells more at once than an event can be")

    def _take(self, block: bytes) -> None:
        """Comments are for the connection. How many a run no longer keeps it says before those it
        keeps, which fill all places here.
        """
        head, _, _ = block.partition(b"\n")
        if head.startswith(b"id: ") and (number := int(head[4:])) > self.newest:
            self.add(RelayedEvent(number, block))


class Relays:
    """One relay for each run that has readers.

    Args:
        asker: asks runs.
    """

    def __init__(self, *, client: RunClient) -> None:
        self._client = client
        self._relays: dict[ControlFile, Relay] = {}

    @asynccontextmanager
    async def reading(self, contact: ControlFile) -> AsyncIterator[Relay]:
        """The relay of a run, with all that the run keeps.

        Raises:
            NoAnswerError: the run does not tell.
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
