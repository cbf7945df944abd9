"""Which page of a list a request asks for."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from tianflow.audit import MOST
from tianflow.service.problems import ProblemError

FURTHEST = 2**62


def asked(request: web.Request) -> tuple[int | None, int]:
    """``before`` and ``limit`` of the query; None: the newest page. Raises ProblemError, 400."""
    limit = _whole(request, "limit", 1, MOST)
    return _whole(request, "before", 0, FURTHEST), MOST if limit is None else limit


def _whole(request: web.Request, name: str, least: int, most: int) -> int | None:
    given = request.query.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 19 and least <= int(given) <= most):
        raise ProblemError(HTTPStatus.BAD_REQUEST, f"{name} is a whole number from {least} to {most}.")
    return int(given)
