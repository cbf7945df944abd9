"""What a config that came over HTTP may name: installed plug-ins, and objects of modules that the
service was told to allow.

Whoever names ``module:attribute`` in a config has it imported and called: that is what configs are
for, and nothing a stranger may do.
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
"""Settings that name what is imported; in these no colon is harmless."""
OBJECT = re.compile(r"\s*[^\W\d][\w.]*\s*:\s*[^\W\d]")
"""``module:attribute``, wherever else it stands."""


def require_allowed(tables: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Look at every string before anything is imported.

    Args:
        tables: the config as it came, by sections or by dotted paths, or what is to be changed of
            it.
        allowed: modules, each with all that lies beneath it.

    Raises:
        ConfigError: naming every setting that names an object of another module.
    """
    problems = [
        Problem(
            path, value, "names an object of a module that is not allowed here", _accepted(allowed)
        )
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
    here = f"; modules allowed here: {', '.join(sorted(allowed))}" if allowed else ""
    return (
        f"the name of an installed plug-in or registered environment{here}; the service's "
        "--allow-import adds a module"
    )


def _strings(path: str, value: object) -> Iterator[tuple[str, str]]:
    """(dotted path, string) of all strings, keys included; items of lists have their list's
    path.
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
