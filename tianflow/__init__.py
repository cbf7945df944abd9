"""tianflow: asynchronous, balanced and controllable training for distributed reinforcement
learning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tianflow.api import load_policy, open_run, train

__version__ = "0.1.0"
__all__ = ["__version__", "load_policy", "open_run", "train"]


def __getattr__(name: str) -> object:
    """Import what computes only when it is asked for: ``import tianflow`` stays quick."""
    if name in {"load_policy", "open_run", "train"}:
        from tianflow import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
