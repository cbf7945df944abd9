"""What was delivered to somebody who was cancelled before it could collect it: that must go back, or it is lost."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


def uncollected(future: asyncio.Future[T | None] | None) -> T | None:
    """The result that already lies in ``future``; None when there is none."""
    if future is None or not future.done() or future.cancelled():
        return None
    return future.result()
