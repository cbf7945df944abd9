"""A command uses an environment on one thread, closes it, and waits only briefly for the close."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from tests.support.environments import CounterEnv, EnvironmentBrokeError
from tianflow.config.model import EnvSettings
from tianflow.envs.make import make
from tianflow.envs.using import with_environment
from tianflow.envs.vector import VectorEnvironment

THREADS: list[int] = []


class ThreadedEnv(CounterEnv):
    """Records the threads on which it is created, reset and closed."""

    def __init__(self) -> None:
        super().__init__()
        THREADS.append(threading.get_ident())

    def close(self) -> None:
        THREADS.append(threading.get_ident())


def one(name: str) -> VectorEnvironment:
    return make(EnvSettings(id=name), 1)


def told(environment: VectorEnvironment) -> str:
    THREADS.append(threading.get_ident())
    return environment.spec.id


def test_it_is_created_used_and_closed_on_one_thread_other_than_the_callers() -> None:
    THREADS.clear()
    name = "tests.envs.test_using:ThreadedEnv"
    assert name == with_environment(lambda: one(name), told, warn=pytest.fail)
    assert 3 == len(THREADS)
    assert 1 == len({*THREADS} - {threading.get_ident()}) == len({*THREADS})


def test_its_exception_reaches_the_caller_without_waiting_for_the_close() -> None:
    def fail(environment: VectorEnvironment) -> None:
        raise EnvironmentBrokeError("no")

    warnings: list[str] = []
    with pytest.raises(EnvironmentBrokeError):
        with_environment(
            lambda: one("tests.support.environments:UnclosableEnv"),
            fail,
            close_s=0.05,
            warn=warnings.append,
        )
    assert 1 == len(warnings)


@pytest.mark.parametrize("error", [EnvironmentBrokeError("no"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_of_its_factory_reaches_the_caller(error: BaseException) -> None:
    def fail() -> VectorEnvironment:
        raise error

    with pytest.raises(type(error)):
        with_environment(fail, told, warn=pytest.fail)


def test_an_environment_that_does_not_close_is_reported_and_the_result_returned() -> None:
    warnings: list[str] = []
    name = "tests.support.environments:UnclosableEnv"
    assert name == with_environment(lambda: one(name), told, close_s=0.05, warn=warnings.append)
    assert ["within 0.05 s"] == [
        sentence[sentence.index("within") : sentence.index(":")] for sentence in warnings
    ]


def test_no_reference_to_it_remains() -> None:
    found = with_environment(
        lambda: one("tests.support.environments:CounterEnv"), weakref.ref, warn=pytest.fail
    )
    gc.collect()
    assert found() is None
