"""Parameters of a query: the page of a list, and other whole numbers."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

from aiohttp import web

from tianflow.rundir.audit_log import MOST
from tianflow.server.common.problems import ProblemError

FURTHEST = 2**62
Default = TypeVar("Default", int, None)


def requested(request: web.Request) -> tuple[int | None, int]:
    """``before`` and ``limit`` of the query; None: the newest page. Raises ProblemError, 400."""
    return whole(request, "before", None, least=0, most=FURTHEST), whole(
        request, "limit", MOST, least=1, most=MOST
    )


def whole(
    request: web.Request, name: str, default: Default, *, least: int, most: int
) -> int | Default:
    """The whole number ``name`` of the query, or ``default``. Raises ProblemError, 400."""
    given = request.query.get(name)
    if given is None:
        return default
    if not (
        given.isascii() and given.isdigit() and len(given) <= 19 and least <= int(given) <= most
    ):
        raise ProblemError(
            HTTPStatus.BAD_REQUEST, f"{name} must be a whole number from {least} to {most}."
        )
    return int(given)
