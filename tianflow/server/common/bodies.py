"""Reads a request's body before its handler starts, with a time limit, so that handlers do not wait
for slow clients.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from aiohttp import web

from tianflow.server.common.problems import Handler, ProblemError

BODY_S = 10.0
"""Time limit of a body, in seconds; its size is at most 64 KiB."""


@web.middleware
async def read_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that reads the body, so that `web.Request.read` returns at once.

    Raises:
        ProblemError: 400 the body cannot be read, or the client disconnected; 408 time limit.
    """
    if request.can_read_body:
        try:
            async with asyncio.timeout(BODY_S):
                await request.read()
        except TimeoutError as error:
            detail = f"The body did not arrive within {BODY_S:g} seconds."
            raise ProblemError(
                HTTPStatus.REQUEST_TIMEOUT, detail, headers={"Connection": "close"}
            ) from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise ProblemError(
                HTTPStatus.BAD_REQUEST, "The body cannot be read.", headers={"Connection": "close"}
            ) from error
    return await handler(request)
