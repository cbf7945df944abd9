"""`Throttle`: a token bucket per client address. The limit is generous; only a runaway loop reaches
it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from tianflow.server.common.problems import Handler, ProblemError

ADDRESSES = 1024
"""Number of remembered addresses. The one with the oldest request is forgotten first, which refills
its bucket.
"""


class Throttle:
    """Token buckets: each holds the requests of one second, and refills steadily.

    Args:
        per_s: requests per second of one address.
        clock: monotonic seconds.
    """

    def __init__(self, *, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._size = max(1.0, per_s)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str) -> float:
        """Take one request. Returns 0 if it was taken, else the seconds until the next one."""
        now = self._clock()
        tokens, then = self._buckets.pop(address, (self._size, now))
        tokens = min(self._size, tokens + (now - then) * self._per_s)
        taken = tokens >= 1.0
        self._buckets[address] = (tokens - 1.0 if taken else tokens, now)
        if len(self._buckets) > ADDRESSES:
            self._buckets.popitem(last=False)
        return 0.0 if taken else (1.0 - tokens) / self._per_s


def throttled(throttle: Throttle) -> Any:
    """Middleware that limits requests per client (429 Too Many Requests). It runs before the token
    check, so that guessing tokens is slow.
    """

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        wait = throttle.take(request.remote or "")
        if wait:
            detail = "This address exceeds http.max_requests_per_s; retry later."
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS, detail, headers={"Retry-After": str(math.ceil(wait))}
            )
        return await handler(request)

    return checked
