"""Short use of an environment outside of a run: create, use, close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tianflow.envs.vector import VectorEnvironment
from tianflow.logs import logger

T = TypeVar("T")
CLOSE_S = 10.0
"""Seconds to wait for close(), because a simulator may end slowly; `run.grace_s` applies in a
run.
"""
log = logger("envs")


def with_environment(
    make: Callable[[], VectorEnvironment],
    use: Callable[[VectorEnvironment], T],
    *,
    close_s: float = CLOSE_S,
    warn: Callable[[str], None] = log.warning,
) -> T:
    """The result of ``use`` for the environment of ``make``, which is closed afterwards.

    Closing is awaited for at most ``close_s`` seconds. All calls are made on one thread that is not
    the main thread, as in a run, because libraries may have thread-local state. An environment that
    does not close is reported to ``warn``, and ends with the process. Exceptions of ``make`` and
    ``use`` are raised.
    """
    answers: list[T] = []
    errors: list[BaseException] = []
    answered, closed = threading.Event(), threading.Event()

    def work() -> None:
        try:
            environment = make()
            try:
                answers.append(use(environment))
            except BaseException as error:  # noqa: BLE001 - raised by the caller, which does not wait for the close
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
            f"the environment did not close within {close_s:g} s: a run will have to kill the "
            "processes that use one"
        )
    if errors:
        raise errors[0]
    return answers[0]
