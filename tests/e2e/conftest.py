"""Tests that wait most of the time, beside each other.

A test with the mark ``beside`` runs in a thread from the moment on at which the first test of its
module begins. Its own place in the order is where its outcome is reported. ``lanes`` such tests of a
module run at the same time, 1 by default; tests without the mark run as usual meanwhile.

A marked test may use ``tmp_path``, parameters, and fixtures of its module. It shares the process with
other tests: it changes nothing there, and reads neither logs nor output of it. It may be skipped by
its own code only: a mark that skips it comes too late.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

MARK, FIXTURE = "beside", "_beside"
Outcomes = dict[str, Future[None]]


@pytest.hookimpl(trylast=True)  # after `-m` has left tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every test of a module with marked tests begin them."""
    modules = {item.path for item in items if item.get_closest_marker(MARK)}
    for item in items:
        if isinstance(item, pytest.Function) and item.path in modules:
            item.fixturenames.append(FIXTURE)


@pytest.fixture(name=FIXTURE, scope="module")
def _beside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcomes]:
    """Outcomes of the marked tests of a module, by id."""
    marked = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and item.get_closest_marker(MARK)
    ]

    def value(item: pytest.Function, name: str) -> object:
        if name == "tmp_path":
            return tmp_path_factory.mktemp(re.sub(r"\W", "_", item.name)[:30])
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return parameters[name] if name in parameters else request.getfixturevalue(name)

    def bound(item: pytest.Function) -> functools.partial[None]:
        names = inspect.signature(item.function).parameters
        return functools.partial(item.function, **{name: value(item, name) for name in names})

    with ThreadPoolExecutor(max(lanes(item) for item in marked)) as pool:
        tests = [(item.nodeid, bound(item)) for item in marked]
        yield {nodeid: pool.submit(test) for nodeid, test in tests}
        pool.shutdown(cancel_futures=True)


def lanes(item: pytest.Function) -> int:
    """How many tests its mark lets run at the same time."""
    marker = item.get_closest_marker(MARK)
    assert marker is not None
    return int(marker.kwargs.get("lanes", 1))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A marked test waits for its outcome."""
    if pyfuncitem.get_closest_marker(MARK) is None:
        return None
    outcomes = pyfuncitem.funcargs[FIXTURE]
    assert isinstance(outcomes, dict)
    outcomes[pyfuncitem.nodeid].result()
    return True
