"""Decides what settings may import, by the origin of the settings.

- The local user (files, command line, Python): everything.
- HTTP: installed plug-ins, registered environments, and objects of the modules that ``tianflow
  serve --allow-import`` or ``http.allowed_imports`` names (`require_allowed`).
- A checkpoint: what HTTP may import, plus the modules that the caller trusts (`require_trusted`).

A ``module:attribute`` in settings is imported and called, so an unchecked one runs any code. An
object of an allowed module must be defined there: modules import other modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tianflow import plugins
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


def require_allowed(
    tables: Mapping[str, Any], allowed: Collection[str], *, known: Collection[str] = ()
) -> None:
    """Check every string of a config from HTTP. Imports allowed modules only.

    Args:
        tables: the config by sections or dotted paths, or a change of it.
        allowed: allowed modules, each with its submodules.
        known: names that are in force already.

    Raises:
        ConfigError: naming every setting with an object of another module.
    """
    advice = "`tianflow serve --allow-import MODULE` allows a module"
    _require(tables, allowed, known, advice, check_objects=True)


def require_trusted(tables: Mapping[str, Any], trust: bool | Collection[str]) -> None:
    """Check every string of a config from a checkpoint. Imports nothing.

    Args:
        tables: the config by sections.
        trust: True: everything; modules: each with its submodules; False: no module.

    Raises:
        ConfigError: naming every setting with an object of another module.
    """
    if trust is True:
        return
    advice = (
        "`--trust`, or trust=True in Python, allows every module that the checkpoint names; "
        "trust only what you would run"
    )
    _require(tables, trust or (), (), advice, check_objects=False)


def _require(
    tables: Mapping[str, Any],
    allowed: Collection[str],
    known: Collection[str],
    advice: str,
    *,
    check_objects: bool,
) -> None:
    problems = [
        Problem(path, value, message, _accepted(allowed, advice))
        for path, value in _strings("", tables)
        if value not in known
        and _names_object(path, value)
        and (message := _refusal(path, value, allowed, check_objects=check_objects))
    ]
    if problems:
        raise ConfigError(problems)


def _names_object(path: str, value: str) -> bool:
    return ":" in value if path in NAMES else OBJECT.match(value) is not None


def _refusal(path: str, value: str, allowed: Collection[str], *, check_objects: bool) -> str:
    """Why ``value`` may not be imported, or ``""``."""
    module, _, attribute = (part.strip() for part in value.partition(":"))
    if not _is_allowed(module, allowed):
        return "names an object of a module that is not allowed"
    if "." in attribute:
        return "names an attribute with a dot, which may lead to another module"
    if not check_objects or not attribute.isidentifier():  # an id that the module registers
        return ""
    try:
        found = plugins.load_object(f"{module}:{attribute}", path=path)
    except ConfigError:  # reported where the setting is used
        return ""
    home = getattr(found, "__module__", None)
    if isinstance(home, str) and _is_allowed(home, allowed):
        return ""
    where = f"is defined in {home!r}" if isinstance(home, str) else "is not a class or a function"
    return f"names an object that {where}, not in an allowed module"


def _is_allowed(module: str, allowed: Collection[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def _accepted(allowed: Collection[str], advice: str) -> str:
    modules = f", or an object of {', '.join(sorted(allowed))}" if allowed else ""
    return f"the name of an installed plug-in or registered environment{modules}; {advice}"


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
