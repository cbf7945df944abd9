"""Start-up time is a promise: what computes, simulates or serves is imported only where it is
needed.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from functools import cache

import pytest

import tianflow

COMPUTES = (
    "tianflow.ops",
    "tianflow.networks",
    "tianflow.algorithms",
    "tianflow.components",
    "tianflow.hosts.factory",
    "tianflow.policy",
    "tianflow.cli.video",
    "tianflow.export.deployed",
    "tianflow.export.formats",
)
"""What may be made of PyTorch. Everything else, the coordinator first, imports it at most inside a
function that computes.
"""

WRAPS = ("tianflow.envs.pooled",)
"""What can be imported only beside an extra."""

COMMAND = """
import sys
sys.argv = ["tianflow", *{arguments!r}]
from tianflow.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
SAY = (
    "\nimport sys\nprint('imported:', *sorted({module.split('.')[0] for module in sys.modules}))\n"
)


@cache
def imported(code: str) -> frozenset[str]:
    """Top-level packages in memory after ``code`` has run in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code + SAY], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    return frozenset(done.stdout.rpartition("imported:")[2].split())


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"torch", "gymnasium", "aiohttp", "numpy"}),
        (["train", "--help"], {"torch", "gymnasium", "aiohttp", "numpy"}),
        (
            ["config", "show", "cartpole_ppo", "--resolved"],
            {"torch", "gymnasium", "aiohttp", "numpy"},
        ),
        (["validate", "cartpole_ppo"], {"torch", "aiohttp"}),
        (
            ["validate", "cartpole_ppo", "env.id=CartPole-v1", "network.lstm=8"],
            {"torch", "aiohttp"},
        ),
        (["status"], {"torch", "gymnasium", "aiohttp", "numpy"}),
        (["env-server", "--help"], {"torch", "gymnasium", "aiohttp", "numpy", "zmq"}),
        (["validate", "cartpole_ppo"], {"zmq"}),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: list[str], absent: set[str]) -> None:
    assert set() == imported(COMMAND.format(arguments=arguments)) & absent


def test_importing_the_package_imports_nothing_else() -> None:
    assert set() == imported("import tianflow") & {
        "torch",
        "gymnasium",
        "aiohttp",
        "numpy",
        "pydantic",
        "typer",
    }


@pytest.mark.e2e
def test_only_what_computes_imports_pytorch() -> None:
    names = [module.name for module in pkgutil.walk_packages(tianflow.__path__, "tianflow.")]
    quick = [
        name
        for name in names
        if not name.startswith((*COMPUTES, *WRAPS)) and not name.endswith("__main__")
    ]
    assert "torch" not in imported("\n".join(f"import {name}" for name in quick))


@pytest.mark.e2e
def test_algorithms_that_compute_nothing_are_imported_without_pytorch() -> None:
    """Coordinators of many tests import them to read their settings."""
    names = ("tests.support.oracle", "tests.e2e.steady", "benchmarks.lib.storm.environment")
    assert "torch" not in imported("\n".join(f"import {name}" for name in names))


def test_what_the_package_offers_is_found_on_demand() -> None:
    assert {"load_policy", "open_run", "train"} <= set(tianflow.__all__)
    with pytest.raises(AttributeError, match="no_such_thing"):
        tianflow.no_such_thing  # noqa: B018
