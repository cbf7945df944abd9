"""`RunClient`: the service's HTTP client of its runs, for status, actions, metrics, events and
forwarded requests.
"""

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
"""Timeout of an answer, in seconds. A run's coordinator does not compute, so a run that is slower
is stopped or overloaded.
"""
METRICS_S = 2.0
"""Timeout of metrics, in seconds; shorter than the timeout of a scraper, so that one run does not
cost the metrics of the others.
"""
SILENCE_S = 45.0
"""Timeout of an event stream, in seconds: three heartbeats."""
FORWARDED = ("Accept", "Content-Type", "If-Match")
RETURNED = ("Accept-Patch", "Allow", "Content-Type", "ETag", "Location", "Retry-After")


class NoAnswerError(TianflowError):
    """The run did not answer, or not as expected."""


class RunClient:
    """HTTP client of runs. Open it with ``async with``."""

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def status(self, contact: ControlFile) -> Mapping[str, Any]:
        """The run's document. Raises `NoAnswerError`."""
        try:
            async with self._session.get(_url(contact), headers=contact.authorization) as answer:
                if answer.status != HTTPStatus.OK:
                    raise NoAnswerError(f"it answers with status {answer.status}")
                found: Mapping[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise NoAnswerError(
                f"it does not answer: {str(error) or type(error).__name__}"
            ) from error

    async def act(self, contact: ControlFile, action: str) -> None:
        """Request an action and ignore a refusal."""
        try:
            async with self._session.post(
                f"{_url(contact)}/{action}", headers=contact.authorization
            ):
                pass
        except (aiohttp.ClientError, TimeoutError):
            return

    async def metrics(self, contact: ControlFile, accept: str) -> str:
        """The run's metrics in the format of ``accept``; "" if it does not answer."""
        headers, timeout = (
            contact.authorization | {"Accept": accept},
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
        """Forward ``request`` to the run and return its answer.

        Raises:
            ProblemError: 503, the run does not answer.
        """
        body = await request.read()
        try:
            async with self._session.request(
                request.method,
                _url(contact, rest),
                params=request.query,
                data=body or None,
                headers=_forwarded(contact, request),
            ) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    headers=_chosen(answer.headers, RETURNED),
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unreachable(contact, error) from error

    @asynccontextmanager
    async def events(
        self, contact: ControlFile, number: int, *, follow: bool
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Stream the events of a run after ``number``. The stream just ends if the run is killed.

        Raises:
            NoAnswerError: the run did not answer, or not with events.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
        headers, params = (
            contact.authorization | {"Last-Event-ID": str(number)},
            {"follow": "true" if follow else "false"},
        )
        opening = self._session.get(
            _url(contact, "/events"), params=params, headers=headers, timeout=timeout
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await opening
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        async with answer:
            if answer.status != HTTPStatus.OK:
                raise NoAnswerError(f"it answers with status {answer.status}")
            yield _chunks(answer)


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    with suppress(aiohttp.ClientError, TimeoutError):
        async for data in answer.content.iter_any():
            yield data


def _url(contact: ControlFile, rest: str = "") -> str:
    return contact.address + contact.path(rest)


def _forwarded(contact: ControlFile, request: web.Request) -> dict[str, str]:
    return _chosen(request.headers, FORWARDED) | contact.authorization


def _chosen(headers: CIMultiDictProxy[str], names: tuple[str, ...]) -> dict[str, str]:
    """The headers of ``names``; several lines of one become one list (RFC 9110, 5.3)."""
    return {name: ", ".join(headers.getall(name)) for name in names if name in headers}


def unreachable(contact: ControlFile, error: BaseException) -> ProblemError:
    """503: the run does not answer."""
    detail = f"Run {contact.run!r} does not answer: {str(error) or type(error).__name__}."
    return ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers={"Retry-After": "1"})
