"""tianflow: asynchronous, balanced and controllable training for distributed reinforcement
learning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tianflow.api import FinishedRun, OpenRun, attach, load_policy, open_run, start, train
    from tianflow.config.model import Config
    from tianflow.errors import TianflowError
    from tianflow.handle import RunHandle
    from tianflow.policy import LoadedPolicy
    from tianflow.server.common.client import StreamedEvent

__version__ = "0.1.0"
__all__ = [
    "Config",
    "FinishedRun",
    "LoadedPolicy",
    "OpenRun",
    "RunHandle",
    "StreamedEvent",
    "TianflowError",
    "__version__",
    "attach",
    "load_policy",
    "open_run",
    "start",
    "train",
]
_HOMES = {
    "Config": "tianflow.config.model",
    "LoadedPolicy": "tianflow.policy",
    "RunHandle": "tianflow.handle",
    "StreamedEvent": "tianflow.server.common.client",
    "TianflowError": "tianflow.errors",
}
"""Modules of public names outside of `tianflow.api`."""


def __getattr__(name: str) -> object:
    """Import what computes only when it is asked for: ``import tianflow`` stays quick."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(_HOMES.get(name, "tianflow.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
