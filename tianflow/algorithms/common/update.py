"""Helpers of updates: names of arrays, and the default of ``should_stop``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Tree = Mapping[str, Tensor]


def never_stop() -> bool:
    """Default of ``should_stop``: never stop."""
    return False


def subtree(arrays: Tree, prefix: str) -> dict[str, Tensor]:
    """The arrays whose names begin with ``prefix``, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
