"""A request's body: read before its handler begins, within a size and a time, so that no handler
waits for who sends it slowly.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from aiohttp import web

from tianflow.server.common.problems import Handler, ProblemError

BODY_S = 10.0
"""Seconds in which a body must be there; it is 64 KiB at most."""


@web.middleware
async def read_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The middleware that reads the body, if there is one; `web.Request.read` then answers at once.

    Raises:
        ProblemError: 400 it cannot be read, or whoever sent it left; 408 it did not come in time.
    """
    if request.can_read_body:
        try:
            async with asyncio.timeout(BODY_S):
                await request.read()
        except TimeoutError as error:
            detail = f"A body must come within {BODY_S:g} seconds."
            raise ProblemError(
                HTTPStatus.REQUEST_TIMEOUT, detail, headers={"Connection": "close"}
            ) from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise ProblemError(
                HTTPStatus.BAD_REQUEST, "The body cannot be read.", headers={"Connection": "close"}
            ) from error
    return await handler(request)
