"""Making an environment, using it and closing it again, as the commands do that look at one before
or after a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tianflow.envs.vector import VectorEnvironment
from tianflow.logs import logger

T = TypeVar("T")
CLOSE_S = 10.0
"""A simulator of its own may take seconds to end; in a run, `run.grace_s` is what a host has for
it.
"""
log = logger("envs")


def used(
    make: Callable[[], VectorEnvironment],
    use: Callable[[VectorEnvironment], T],
    *,
    close_s: float = CLOSE_S,
    warn: Callable[[str], None] = log.warning,
) -> T:
    """What ``use`` makes of the environment that ``make`` makes. It is closed, but nobody waits for
    that longer than ``close_s``.

    All of it happens on one thread that is not the main one, as in a run: what a library has on the
    thread of the constructor it finds in ``close``, too. What does not close is told to ``warn``,
    and ends with the process. Raises what ``make`` and ``use`` raise.
    """
    answers: list[T] = []
    errors: list[BaseException] = []
    answered, closed = threading.Event(), threading.Event()

    def work() -> None:
        try:
            environment = make()
            try:
                answers.append(use(environment))
            except BaseException as error:  # noqa: BLE001 - the caller's, and it need not wait for what follows
                errors.append(error)
            answered.set()
            environment.close()
        except BaseException as error:  # noqa: BLE001 - as above
            errors.append(error)
        finally:
            answered.set()
            closed.set()

    threading.Thread(target=work, name="environment", daemon=True).start()
    answered.wait()
    if not closed.wait(close_s):
        warn(
            f"the environment does not come back from close() within {close_s:g} s: a run will "
            "have to kill the processes that hold one"
        )
    if errors:
        raise errors[0]
    return answers[0]
