"""The machines of `benchmarks.lib.namespaces` in tests, and what tests do where there are none."""

from __future__ import annotations

import pytest

from benchmarks.lib.namespaces import (
    NAMESPACES,
    PREFIX,
    SUBNET,
    Machine,
    MachineError,
    Traffic,
    cannot_limit,
    machines,
    missing,
)

__all__ = [
    "NAMESPACES",
    "PREFIX",
    "SUBNET",
    "Machine",
    "MachineError",
    "Traffic",
    "cannot_limit",
    "machines",
    "missing",
    "require_machines",
]


def require_machines() -> None:
    """Skip the test where there are none."""
    if reason := missing():
        pytest.skip(reason)
