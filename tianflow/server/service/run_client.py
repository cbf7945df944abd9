"""The service as a client of its runs: short questions, and requests of others passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from aiohttp import web

from tianflow.errors import TianflowError
from tianflow.rundir.control_file import ControlFile
from tianflow.server.common.problems import ProblemError

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

ANSWER_S = 5.0
"""Seconds in which a run must answer; its coordinator computes nothing, so one that does not is
stopped or swamped.
"""
METRICS_S = 2.0
"""Seconds in which a run must give its metrics: less than a scraper waits for the whole page, which
one run must not cost all others.
"""
SILENT_S = 45.0
"""Seconds without a word, three comments of a stream that is alive long, after which a run is gone.
"""
ASKED = ("Accept", "Content-Type", "If-Match")
ANSWERED = ("Accept-Patch", "Allow", "Content-Type", "ETag", "Location", "Retry-After")


class NoAnswerError(TianflowError):
    """The run does not answer, or not with what was asked for."""


class RunClient:
    """Asks runs. Open it with ``async with``."""

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def status(self, contact: ControlFile) -> Mapping[str, Any]:
        """The run's own document. Raises `NoAnswerError`."""
        try:
            async with self._session.get(_url(contact), headers=_token(contact)) as answer:
                if answer.status != HTTPStatus.OK:
                    raise NoAnswerError(f"it answers with {answer.status}")
                found: Mapping[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise NoAnswerError(
                f"it does not answer: {str(error) or type(error).__name__}"
            ) from error

    async def act(self, contact: ControlFile, action: str) -> None:
        """Ask for an action; that it was refused is the run's affair."""
        try:
            async with self._session.post(f"{_url(contact)}/{action}", headers=_token(contact)):
                pass
        except (aiohttp.ClientError, TimeoutError):
            return

    async def metrics(self, contact: ControlFile, accept: str) -> str:
        """Its metrics, in the format that ``accept`` asks for; "" when it does not answer."""
        headers, timeout = (
            _token(contact) | {"Accept": accept},
            aiohttp.ClientTimeout(total=METRICS_S),
        )
        try:
            async with self._session.get(
                f"{contact.address}/metrics", headers=headers, timeout=timeout
            ) as answer:
                return await answer.text() if answer.status == HTTPStatus.OK else ""
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return ""

    async def forward(self, contact: ControlFile, request: web.Request, rest: str) -> web.Response:
        """The run's answer to ``request``, whatever it is.

        Raises:
            ProblemError: 503, it does not answer.
        """
        body = await request.read()
        try:
            async with self._session.request(
                request.method,
                _url(contact, rest),
                params=request.query,
                data=body or None,
                headers=_passed_on(contact, request),
            ) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    headers=_chosen(answer.headers, ANSWERED),
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise silent(contact, error) from error

    @asynccontextmanager
    async def events(
        self, contact: ControlFile, number: int, *, follow: bool
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """What the run tells after the event of that ``number``, as it comes. A run that was killed
        is an end and no error.

        Raises:
            NoAnswerError: it does not answer, or not with events.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENT_S)
        headers, params = (
            _token(contact) | {"Last-Event-ID": str(number)},
            {"follow": "true" if follow else "false"},
        )
        asked = self._session.get(
            _url(contact, "/events"), params=params, headers=headers, timeout=timeout
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await asked
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        async with answer:
            if answer.status != HTTPStatus.OK:
                raise NoAnswerError(f"it answers with {answer.status}")
            yield _chunks(answer)


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    with suppress(aiohttp.ClientError, TimeoutError):
        async for data in answer.content.iter_any():
            yield data


def _url(contact: ControlFile, rest: str = "") -> str:
    return f"{contact.address}/api/v1/runs/{contact.run}{rest}"


def _token(contact: ControlFile) -> dict[str, str]:
    return {"Authorization": f"Bearer {contact.token}"}


def _passed_on(contact: ControlFile, request: web.Request) -> dict[str, str]:
    return _chosen(request.headers, ASKED) | _token(contact)


def _chosen(headers: CIMultiDictProxy[str], names: tuple[str, ...]) -> dict[str, str]:
    """Those of ``names``; several lines of one are one list (RFC 9110, 5.3)."""
    return {name: ", ".join(headers.getall(name)) for name in names if name in headers}


def silent(contact: ControlFile, error: BaseException) -> ProblemError:
    """503: the run does not answer."""
    detail = f"Run {contact.run!r} does not answer: {str(error) or type(error).__name__}."
    return ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers={"Retry-After": "1"})
