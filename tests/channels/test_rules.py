"""Two rules for all that moves or waits: nothing is pickled, and no wall clock decides when
something expires.
"""

from __future__ import annotations

import ast
import asyncio
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import tianflow
from tests.support.worlds import FIRST, SharedWorld, tickets
from tianflow.core.payloads import Version

PACKAGE = Path(tianflow.__file__).parent
MOVING = sorted(
    path
    for room in ("channels", "exchange", "launchers", "hosts")
    for path in (PACKAGE / room).glob("*.py")
)
REPORTING = {"checkpointing", "run"}
"""Modules of the coordinator that report when something happened, as a date."""
WAITING = sorted(
    path
    for path in (
        *MOVING,
        *(PACKAGE / "observability").glob("rates.py"),
        *(
            path
            for room in ("components", "coordinator", "core", "ledger")
            for path in (PACKAGE / room).glob("*.py")
        ),
    )
    if path.stem not in REPORTING
)
PICKLES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "multiprocessing",
    "joblib",
}
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[str]:
    """The last two names of every attribute; "" is one that is not a plain name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            yield f"{name}.{node.attr}"


@pytest.mark.parametrize("path", MOVING, ids=lambda path: path.stem)
def test_nothing_that_moves_between_processes_is_pickled(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not PICKLES & set(imports(tree))
    assert not {
        name for name in attributes(tree) if name.endswith((".allow_pickle", ".__reduce__"))
    }
    assert "allow_pickle" not in path.read_text()


def modules_that_name(names: Iterable[str]) -> dict[str, ast.AST]:
    """Modules of the package whose text has one of ``names``, by path: all that can use them."""
    named = re.compile("|".join(names))
    texts = {
        path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")
    }
    assert len(texts) > 200
    return {name: ast.parse(text) for name, text in sorted(texts.items()) if named.search(text)}


def test_nothing_in_the_package_imports_pickle() -> None:
    """A module that no socket meets may become one that a socket meets."""
    found = modules_that_name(PICKLES)
    assert found
    assert [] == [name for name, tree in found.items() if PICKLES & set(imports(tree))]


LISTENERS = {
    "server/run/server.py": {"listener.listen", "loop.create_server"},
    "envs/server.py": {"TcpListener"},
    "hosts/gateway.py": {"TcpListener"},
    "channels/direct.py": {"TcpListener"},
}
"""Modules that listen, and how. The last three require keys off loopback."""
LISTENING = {"listen", "create_server", "start_server", "start_unix_server", "TcpListener"}
TO_OTHERS = {"client.listen", "listen"}
"""Functions with such a name that do not listen: they read the events of a server."""


def calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in LISTENING:
                yield ast.unparse(node.func)


def test_only_the_modules_that_are_known_for_it_listen() -> None:
    found = {
        name: {call.replace("asyncio.get_running_loop()", "loop") for call in calls(tree)}
        for name, tree in modules_that_name(LISTENING).items()
    }
    listening = {name: made - TO_OTHERS for name, made in found.items() if made - TO_OTHERS}
    assert listening == LISTENERS


@pytest.mark.parametrize("path", WAITING, ids=lambda path: path.stem)
def test_no_wall_clock_decides_when_something_expires(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not WALL_CLOCKS & {*imports(tree), *attributes(tree)}


async def test_a_wall_clock_that_jumps_a_day_ahead_expires_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = SharedWorld(batch=1, bound=1, slots=4, patience=3600.0)
    slow, fast, source = world.sender("slow"), world.sender("fast"), world.source()
    wanted = await world.begun(slow)
    await world.committed(fast)
    await world.update(source)
    await world.committed(fast)
    pulling = asyncio.ensure_future(source.next_batch(Version(1, 1)))
    await world.quiet()
    wall = time.time()
    monkeypatch.setattr(time, "time", lambda: wall + 86400)
    await world.quiet()
    assert (False, {}) == (pulling.done(), world.seen.dropped)
    world.commit(slow, wanted, FIRST)
    assert (wanted.ticket,) == tickets(await asyncio.wait_for(pulling, 10))
    world.close()
