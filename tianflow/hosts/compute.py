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
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, overload

from tianflow.components.turns import Turns, Wait

if TYPE_CHECKING:
    from tianflow.interfaces import Bell

T = TypeVar("T")
Deliver: TypeAlias = Callable[[object, BaseException | None], None]


class _Parked(NamedTuple):
    """Work that waits, and where its result goes."""

    wait: Wait
    turns: Turns[Any]
    deliver: Deliver


class Compute:
    """A queue of functions and the thread that calls them, first come first served.

    A function may also return `Turns`. The thread runs other work while they wait, and continues
    them when their wait is over.

    Args:
        name: of the thread.
        on_orphan: gets the exception of a function whose caller no longer waits, so that every
            exception is reported.
        on_end: called on the thread when it ends, after `close`.
        bell: rings when a wait may be over; without one, no work may wait.
    """

    def __init__(
        self,
        *,
        name: str,
        on_orphan: Callable[[BaseException], None],
        on_end: Callable[[], None] = lambda: None,
        bell: Bell | None = None,
    ) -> None:
        self._on_orphan, self._on_end, self._bell = on_orphan, on_end, bell
        # Bounded by the number of components of the host: each waits for its own turn before it
        # asks for another.
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Deliver] | None] = (
            queue.SimpleQueue()
        )
        self._parked: list[_Parked] = []
        self.stopping = threading.Event()
        """Set when the host is to end; compute functions read it once a step or minibatch."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @overload
    async def run(self, function: Callable[[], Turns[T]]) -> T: ...
    @overload
    async def run(self, function: Callable[[], T]) -> T: ...
    async def run(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` on the thread and wait for what it returns or raises.

        A cancelled caller leaves the function running; what it raises then goes to ``on_orphan``.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

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
        self.wake()
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

    def beside(self, name: str) -> Compute:
        """Another thread, for work that waits for a device. Its orphans go the same way."""
        return Compute(name=name, on_orphan=self._on_orphan)

    def wake(self) -> None:
        """Look again whether waits are over."""
        if self._bell is not None:
            self._bell.ring()

    def close(self) -> None:
        """Ask the running function to stop; the thread ends after it. Does not wait."""
        self.stopping.set()
        self._jobs.put(None)
        self.wake()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._call(*job)
            del job  # a waiting thread must not hold the last result
        for parked in self._parked:
            parked.turns.close()
        self._on_end()

    def _next(self) -> tuple[Callable[[], Any], Deliver] | None:
        """The next function; None: the end. Work whose wait is over continues meanwhile."""
        if self._bell is None:
            return self._jobs.get()
        while True:
            try:
                return self._jobs.get_nowait()
            except queue.Empty:
                if not self._continue_parked():
                    until = min((p.wait.until for p in self._parked if p.wait.until), default=None)
                    self._bell.wait(until)

    def _continue_parked(self) -> bool:
        """Continue all work whose wait is over. False: there was none."""
        now = time.monotonic()
        over = [parked for parked in self._parked if parked.wait.is_over(now)]
        for parked in over:
            self._parked.remove(parked)
            self._turn(parked.turns, parked.deliver)
        return bool(over)

    def _call(self, function: Callable[[], Any], deliver: Deliver) -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - a boundary: the error belongs to the caller
            deliver(None, error)
        else:
            if isinstance(result, Generator):
                self._turn(result, deliver)
            else:
                deliver(result, None)

    def _turn(self, turns: Turns[Any], deliver: Deliver) -> None:
        """Run until the next wait, or to the end."""
        try:
            wait = next(turns)
        except StopIteration as end:
            deliver(end.value, None)
        except BaseException as error:  # noqa: BLE001 - a boundary: the error belongs to the caller
            deliver(None, error)
        else:
            if self._bell is not None:
                self._parked.append(_Parked(wait, turns, deliver))
            else:
                turns.close()
                deliver(None, RuntimeError("work waits on a thread without a doorbell"))
