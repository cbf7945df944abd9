"""The history of a run as an answer: charts of a run that has trained for a while start with it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

from aiohttp import web

from tianflow.core.jsonable import json_ready
from tianflow.rundir.history import LIMIT, NAME, Row, read_rows, thinned
from tianflow.server.common.pages import whole_number
from tianflow.server.common.problems import ProblemError

FEWEST, USUAL = 2, 500
"""Rows of an answer: the minimum, and the maximum without ``points`` in the query."""


async def answer(directory: Path, request: web.Request) -> web.Response:
    """Rows of the run in ``directory``, as `answer_with`."""
    return await answer_with(lambda: read_rows(directory / NAME), request)


async def answer_with(read: Callable[[], Sequence[Row]], request: web.Request) -> web.Response:
    """Rows that ``read`` returns, at most ``points`` of the query, and the Unix time now.

    Raises:
        ProblemError: 400, ``points`` is not a valid number; 503, the file cannot be read.
    """
    points = whole_number(request, "points", USUAL, minimum=FEWEST, maximum=LIMIT)
    try:
        text = await asyncio.to_thread(_thinned, read, points)
    except OSError as error:
        raise ProblemError(
            HTTPStatus.SERVICE_UNAVAILABLE, f"The history cannot be read: {error.strerror}."
        ) from error
    return web.Response(text=text, content_type="application/json")


def _thinned(read: Callable[[], Sequence[Row]], points: int) -> str:
    """Read in a thread: the file may hold a megabyte."""
    rows = thinned(read(), points)
    return json.dumps(json_ready({"history": rows, "time": time.time()}), allow_nan=False)
