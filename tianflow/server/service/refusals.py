"""Middleware for errors of the store: its disk may be full or missing."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from tianflow.server.common.problems import Handler, ProblemError
from tianflow.server.service.store import StoreError


@web.middleware
async def store_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that answers 503 while the store cannot be used."""
    try:
        return await handler(request)
    except StoreError as error:
        raise ProblemError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"The service cannot use its store: {error}.",
            kind="store",
            headers={"Retry-After": "5"},
        ) from error
