"""EnvironmentProgress: which call of which environment is in progress, for a reader on another
thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from typing import Any

from tianflow.core.payloads import Activity


class _Turns(list[Any]):
    """The environments of a vector that steps one after another.

    The iterator of the call in progress is its position: a list iterator knows how many items are
    left. Noting it costs once per vector step, not once per environment.
    """

    def __init__(self, environments: Iterable[Any]) -> None:
        super().__init__(environments)
        self.iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iterator = super().__iter__()
        return iterator


def _ignore_wait(waiting: bool) -> None:
    """Nothing follows the waits."""


class EnvironmentProgress:
    """Follows the environments of one actor.

    The compute thread writes, the loop of the host reads. A reader sees either the old or the new
    value of each field, which is enough to compare two readings.
    """

    __slots__ = ("_turns", "calls", "on_wait", "operation")

    def __init__(self) -> None:
        self.operation = ""
        """See `Activity.operation`; "" while no operation is in progress."""
        self.calls = 0
        """See `Activity.calls`."""
        self.on_wait: Callable[[bool], None] = _ignore_wait
        """Called with the argument of `waits`."""
        self._turns: _Turns | None = None

    @contextlib.contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """``operation`` is in progress inside the context."""
        self.calls += 1
        self.operation = operation
        try:
            yield
        finally:
            self.operation = ""

    def waits(self, waiting: bool) -> None:
        """The trajectory in progress begins, or ends, to wait for an inference server. No
        environment is at work meanwhile.
        """
        self.operation = "inference" if waiting else "step"
        self.on_wait(waiting)

    def constructed(self, environment: Any) -> Any:
        """Count one constructor. Returns ``environment``, so it can stand among wrappers."""
        self.calls += 1
        return environment

    def follow(self, vector: Any) -> None:
        """Follow the environments of ``vector``, if it steps them one after another."""
        import gymnasium

        if isinstance(vector, gymnasium.vector.SyncVectorEnv):
            vector.envs = self._turns = _Turns(vector.envs)

    def activity(self, component: str) -> Activity | None:
        """The operation in progress; None without one."""
        operation, turns = self.operation, self._turns
        if not operation:
            return None
        environment = -1
        if turns is not None and operation in ("reset", "step"):
            environment = len(turns) - length_hint(turns.iterator) - 1
        return Activity(component, operation, self.calls, environment)
