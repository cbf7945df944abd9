"""How often one address may ask: a token bucket for each, generous enough that only a loop that
went wild meets it.
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
"""Addresses that are remembered; the one that asked longest ago is forgotten first, which gives it
a full bucket.
"""


class Throttle:
    """A bucket for each address holds one second's worth of requests, and fills steadily.

    Args:
        per_s: requests a second from one address.
        clock: monotonic seconds.
    """

    def __init__(self, *, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._size = max(1.0, per_s)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str) -> float:
        """Take one request's worth; seconds until there will be one, when there is none (0:
        taken).
        """
        now = self._clock()
        held, then = self._buckets.pop(address, (self._size, now))
        held = min(self._size, held + (now - then) * self._per_s)
        taken = held >= 1.0
        self._buckets[address] = (held - 1.0 if taken else held, now)
        if len(self._buckets) > ADDRESSES:
            self._buckets.popitem(last=False)
        return 0.0 if taken else (1.0 - held) / self._per_s


def throttled(throttle: Throttle) -> Any:
    """The middleware that answers 429 to who asks too often. It is asked before any token is looked
    at, so guessing is slow, too.
    """

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        wait = throttle.take(request.remote or "")
        if wait:
            detail = (
                "Too many requests from this address; http.max_requests_per_s says how many "
                "may come."
            )
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS, detail, headers={"Retry-After": str(math.ceil(wait))}
            )
        return await handler(request)

    return checked
