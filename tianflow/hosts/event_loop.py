"""Runs a coroutine to its end, on the faster event loop where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where it is installed: a message between two processes costs a third
    less there.
    """
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def require_none(name: str, *, instead: str) -> None:
    """Raise RuntimeError if a loop runs in this thread already, as in a notebook: ``name`` blocks,
    and would stop that loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"{name} blocks, and an event loop is running here already, as in a notebook; there: "
        f"{instead}"
    )
