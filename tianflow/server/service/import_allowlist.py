"""Checks which objects a config from HTTP may name: installed plug-ins, and objects of allowed
modules.

A ``module:attribute`` in a config is imported and called. Clients must not be able to call
arbitrary code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tianflow.errors import ConfigError, Problem

NAMES = frozenset(
    {
        "env.id",
        "env.wrappers",
        "network.name",
        "algorithm.name",
        "balance.controller",
        "metrics.sinks",
        "placement.launcher",
    }
)
"""Settings that name what is imported; any colon in them counts."""
OBJECT = re.compile(r"\s*[^\W\d][\w.]*\s*:\s*[^\W\d]")
"""``module:attribute`` in any other setting."""


def require_allowed(tables: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Check every string before anything is imported.

    Args:
        tables: the config by sections or dotted paths, or a change of it.
        allowed: allowed modules, each with its submodules.

    Raises:
        ConfigError: naming every setting with an object of another module.
    """
    problems = [
        Problem(path, value, "names an object of a module that is not allowed", _accepted(allowed))
        for path, value in _strings("", tables)
        if _names_object(path, value) and not _is_allowed(value, allowed)
    ]
    if problems:
        raise ConfigError(problems)


def _names_object(path: str, value: str) -> bool:
    return ":" in value if path in NAMES else OBJECT.match(value) is not None


def _is_allowed(value: str, allowed: Collection[str]) -> bool:
    module = value.partition(":")[0].strip()
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def _accepted(allowed: Collection[str]) -> str:
    modules = f", or an object of {', '.join(sorted(allowed))}" if allowed else ""
    return (
        f"the name of an installed plug-in or registered environment{modules}; `tianflow serve "
        "--allow-import MODULE` allows a module"
    )


def _strings(path: str, value: object) -> Iterator[tuple[str, str]]:
    """(dotted path, string) of all strings, with keys; items of a list have the path of
    the list.
    """
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else str(key)
            yield inner_path, str(key)
            yield from _strings(inner_path, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(path, inner)
