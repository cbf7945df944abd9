"""The history of a run as an answer, so that charts of a run that has gone on for a while need not
begin empty.
"""

from __future__ import annotations

import asyncio
import json
import time
from http import HTTPStatus
from pathlib import Path

from aiohttp import web

from tianflow.core.jsonable import json_ready
from tianflow.rundir.history import LIMIT, NAME, read_rows, thinned
from tianflow.server.common.pages import whole
from tianflow.server.common.problems import ProblemError

FEWEST, USUAL = 2, 500
"""Lines of an answer: the least that can be asked for, and how many there are at most when nobody
asks.
"""


async def answer(directory: Path, request: web.Request) -> web.Response:
    """Lines of the run in ``directory``, at most as many as the query's ``points`` says, and the
    Unix time now.

    Raises:
        ProblemError: 400, that is no such number; 503, the file cannot be read.
    """
    points = whole(request, "points", USUAL, least=FEWEST, most=LIMIT)
    try:
        text = await asyncio.to_thread(_read, directory / NAME, points)
    except OSError as error:
        raise ProblemError(
            HTTPStatus.SERVICE_UNAVAILABLE, f"The history cannot be read: {error.strerror}."
        ) from error
    return web.Response(text=text, content_type="application/json")


def _read(path: Path, points: int) -> str:
    """Away from the loop: the file may hold a megabyte."""
    rows = thinned(read_rows(path), points)
    return json.dumps(json_ready({"history": rows, "time": time.time()}), allow_nan=False)
