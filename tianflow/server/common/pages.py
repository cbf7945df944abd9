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
    return whole_number(request, "before", None, minimum=0, maximum=FURTHEST), whole_number(
        request, "limit", MOST, minimum=1, maximum=MOST
    )


def whole_number(
    request: web.Request, name: str, default: Default, *, minimum: int, maximum: int
) -> int | Default:
    """The whole number ``name`` of the query, or ``default``. Raises ProblemError, 400."""
    given = request.query.get(name)
    if given is None:
        return default
    if not (
        given.isascii()
        and given.isdigit()
        and len(given) <= 19
        and minimum <= int(given) <= maximum
    ):
        raise ProblemError(
            HTTPStatus.BAD_REQUEST, f"{name} must be a whole number from {minimum} to {maximum}."
        )
    return int(given)
