"""What holds for every test: a blocked event loop fails it, and in CI a skip is a failure, but for
want of a GPU or a heavy extra.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer.testing
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from tests.support.effort import FACTOR

REQUIRE_ALL = "TIANFLOW_REQUIRE_ALL"
E2E = Path(__file__).parent / "e2e"
LONG = (
    "test_docs.py",
    "test_shards_on_nodes.py",
    "test_console.py",
    "test_slurm.py",
    "test_learning.py",
    "test_simulation.py",
    "test_nodes.py",
    "test_inference.py",
    "test_failures.py",
    "test_ray.py",
    "test_held.py",
    "test_diagnosis.py",
    "test_crossings.py",
    "test_storm.py",
    "test_environments.py",
    "test_ranks.py",
    "test_serve.py",
    "test_described.py",
    "test_replay.py",
    "test_handle.py",
    "test_signals.py",
    "test_live.py",
    "test_prometheus.py",
    "test_slow_links.py",
    "test_strangers.py",
    "test_systemd.py",
    "test_liveness.py",
    "test_benchmarks.py",
    "test_counters.py",
    "test_remote.py",
    "test_deploy.py",
)
"""Modules in ``tests/e2e/`` that take half a minute or have tests beside each other, the
longest module first."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has them ignore SIGINT, and every process they
    # start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tree of commands never changes, and typer would build it for every command that a test runs.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# no deadline: how long an example takes says more of the machine than of the code
settings.register_profile(
    "tianflow",
    max_examples=12 * FACTOR,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
    print_blob=True,
)
settings.load_profile("tianflow")


@pytest.fixture(autouse=True, scope="session")
def _validation_in_this_process() -> Iterator[None]:
    """Environments of tests are made in the process of the test: a child takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tianflow.planning.probe.needs_child", lambda _: False)
        yield


# A hook: a fixture of every test would cost several times as much.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with _logging_as_before(), _a_blocked_loop_fails(item):
        return (yield)


@contextmanager
def _a_blocked_loop_fails(item: pytest.Item) -> Iterator[None]:
    """Calls of our code that block while an event loop runs in the same thread raise."""
    if item.get_closest_marker("asyncio") is None:
        yield
        return
    with blockbuster_ctx(["tianflow", "tianflow_controllers"]):
        yield


@contextmanager
def _logging_as_before() -> Iterator[None]:
    """Commands set logging up for their process, which here is that of all tests."""
    root = logging.getLogger("tianflow")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    yield
    root.handlers[:], root.propagate = handlers, propagate
    if root.level != level:  # it empties the caches of all loggers
        root.setLevel(level)
    structlog.reset_defaults()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What ``-m "not e2e"`` would leave out is not even imported: everything there is marked so."""
    return True if collection_path == E2E and config.getoption("markexpr") == "not e2e" else None


@pytest.hookimpl(trylast=True)  # after `-m` has left tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker begins with long modules, so that it does not end with a long test while the
    others have nothing left. The tests of a module stay together, because they share what its
    fixtures start. With ``--dist worksteal`` each worker first gets an equal part of all tests.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if not workers:
        return
    long: dict[str, list[pytest.Item]] = {name: [] for name in LONG}
    others = []
    for item in items:
        is_long = item.path.parent == E2E and item.path.name in long
        (long[item.path.name] if is_long else others).append(item)
    first: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for place, tests in enumerate(long.values()):
        first[place % workers] += tests
    total, items[:] = len(items), []
    for place, tests in enumerate(first):
        room = (total - len(items)) // (workers - place) - len(tests)
        items += tests + others[: max(0, room)]
        del others[: max(0, room)]
    items += others


def pytest_xdist_auto_num_workers() -> int:
    """One more worker than cores: some tests wait, for a process or a time-out."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and collected tests stay. Looking through them for garbage, again and again, took a
    tenth of all the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(50_000, 20, 100)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``gpu`` run where there are as many GPUs as the mark says, those marked
    ``extra`` where its package is installed.
    """
    gpu = item.get_closest_marker("gpu")
    if gpu is not None and _gpus() < (wanted := gpu.args[0] if gpu.args else 1):
        pytest.skip(f"needs {wanted} GPUs" if wanted > 1 else "needs a GPU")
    extra = item.get_closest_marker("extra")
    if extra is not None and importlib.util.find_spec(extra.args[0]) is None:
        pytest.skip(f"needs the extra {extra.args[0]}, which `dev` does not install")


def _gpus() -> int:
    if not Path("/dev/nvidiactl").exists():  # spares the import
        return 0
    import torch

    return torch.cuda.device_count()


def _fail_if_skipped(report: Any) -> None:
    if os.environ.get(REQUIRE_ALL) and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = (
            "failed",
            f"a part is missing, and {REQUIRE_ALL} is set: {reason}",
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu") is None and item.get_closest_marker("extra") is None:
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report
