"""The one compute thread of a host process. Work that computes takes turns on it; the loop stays
free for messages.

Two computing threads in one process are forbidden, except where operations are long
(`tianflow.algorithms.common.data_parallel`): an operation that releases the interpreter lock waits
up to the switch interval to get it back. The thread is a daemon: a host ends by flushing and
leaving, never by joining it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Compute:
    """A queue of functions and the thread that calls them, first come first served.

    Args:
        name: of the thread.
        on_orphan: gets the exception of a function whose caller no longer waits, so that every
            exception is reported.
        on_end: called on the thread when it ends, after `close`.
    """

    def __init__(
        self,
        *,
        name: str,
        on_orphan: Callable[[BaseException], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_orphan, self._on_end = on_orphan, on_end
        # Bounded by the number of components of the host: each waits for its own turn before it
        # asks for another.
        self._jobs: queue.SimpleQueue[
            tuple[Callable[[], Any], Callable[[object, BaseException | None], None]] | None
        ] = queue.SimpleQueue()
        self.stopping = threading.Event()
        """Set when the host is to end; compute functions read it once a step or minibatch."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the thread and wait for what it returns or raises.

        A cancelled caller leaves the function running; what it raises then goes to ``on_orphan``.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            if future.done():
                if error is not None:
                    self._on_orphan(error)
            elif isinstance(error, StopIteration):  # no future can hold one
                future.set_exception(
                    RuntimeError("a compute function raised StopIteration").with_traceback(
                        error.__traceback__
                    )
                )
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def deliver(result: object, error: BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(finish, result, error)
            except RuntimeError:  # the loop is closed: the process is about to leave
                if error is not None:
                    self._on_orphan(error)

        self._jobs.put((function, deliver))
        try:
            return await future
        except asyncio.CancelledError:
            # Cancelled in the turn in which the answer came: no caller reads it.
            if (
                future.done()
                and not future.cancelled()
                and (error := future.exception()) is not None
            ):
                self._on_orphan(error)
            raise

    def close(self) -> None:
        """Ask the running function to stop; the thread ends after it. Does not wait."""
        self.stopping.set()
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _call(*job)
            del job  # a waiting thread must not hold the last result
        self._on_end()


def _call(
    function: Callable[[], Any], deliver: Callable[[object, BaseException | None], None]
) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - a boundary: the error belongs to the caller
        deliver(None, error)
    else:
        deliver(result, None)
