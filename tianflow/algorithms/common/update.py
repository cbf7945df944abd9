"""What every update has, on policy or off: parts of its batch by name, and somebody who may want it
to stop.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Tree = Mapping[str, Tensor]


def never() -> bool:
    """Nobody wants this update to stop."""
    return False


def subtree(arrays: Tree, prefix: str) -> dict[str, Tensor]:
    """The arrays whose names begin with ``prefix``, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
