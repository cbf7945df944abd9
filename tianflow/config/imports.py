"""Decides what settings may import and where they may write, by the origin of the settings.

- The local user (files, command line, Python): everything.
- HTTP: installed plug-ins, registered environments, and objects of the modules that ``tianflow
  serve --allow-import`` or ``http.allowed_imports`` names (`require_allowed`).
- A checkpoint: what HTTP may import, plus the modules that the caller trusts (`require_trusted`).

A ``module:attribute`` in settings is imported and called, so an unchecked one runs any code. An
object of an allowed module must be defined there: modules import other modules. Settings from HTTP
may not name a place outside the run's directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

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
RUN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}(@best)?")
"""Name of a run, as in ``run.name``, or of its best checkpoint. It is not a path."""
EVALUATED = re.compile(r"^evaluation\.(further\..*?\.)?(?=env\.)")
"""Beginning of the path of a setting that an evaluation has of its own."""
MODULE = re.compile(r"[^\W\d]\w{0,63}(\.[^\W\d]\w{0,63}){0,9}")
"""Dotted name of a module."""
OBJECT = re.compile(r"\s*[^\W\d][\w.]*\s*:\s*[^\W\d]")
"""``module:attribute`` in any other setting."""

SINK_PLACES: Mapping[str, frozenset[str]] = {
    "mlflow": frozenset({"tracking_uri"}),
    "tensorboard": frozenset({"directory"}),
    "wandb": frozenset({"dir", "settings"}),
}
"""Arguments of shipped sinks that name a directory or a server."""
PLACE = re.compile(r"/|^\s*[~.]|^\s*[A-Za-z][\w+.-]*:")
"""A path or URI in an argument of a sink."""
RAY_HERE = ("auto", "local")
"""Values of ``ray.address`` that name no server. A run sends its keys to the cluster, and receives
Python objects from it.
"""
FREE = ("env.kwargs", "env.set", "network.kwargs", "balance.parameters")
"""Settings whose values have any form."""
OUTSIDE = re.compile(r"^\s*(/|~|file:)|(^|/)\.\.(/|$)", re.IGNORECASE)
"""An absolute path, one of a home directory, a file URI, or one with ``..``."""


Permit = Callable[[str], str]
"""How a module can be permitted, as a sentence."""


def at_service(module: str) -> str:
    """`Permit` for the settings of a submission."""
    return f"`--allow-import {module}`, added to the options of `tianflow serve`, permits it"


def at_run(module: str) -> str:
    """`Permit` for a change of a run that no service started."""
    return f'http.allowed_imports = ["{module}"] in the settings of the run permits it'


def by_trust(module: str) -> str:
    """`Permit` for a checkpoint."""
    return f"`--trust`, or trust=[{module!r}] in Python, permits it; trust only what you would run"


def require_allowed(
    tables: Mapping[str, Any],
    allowed: Collection[str],
    *,
    known: Collection[str] = (),
    permit: Permit = at_service,
) -> None:
    """Check every string of a config from HTTP: no object of a module that is not allowed, no place
    outside the run's directory, and no port without a key. Imports allowed modules only.

    Args:
        tables: the config by sections or dotted paths, or a change of it.
        allowed: allowed modules, each with its submodules.
        known: names that are in force already.
        permit: how the module of an object can be permitted.

    Raises:
        ConfigError: naming every setting with an object of another module, or with a place.
    """
    problems = [
        *_refused(tables, allowed, known, permit, check_objects=True),
        *_places(tables),
        *_ports(tables),
    ]
    if problems:
        raise ConfigError(problems)


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
    problems = _refused(tables, trust or (), (), by_trust, check_objects=False)
    if problems:
        raise ConfigError(problems)


def _refused(
    tables: Mapping[str, Any],
    allowed: Collection[str],
    known: Collection[str],
    permit: Permit,
    *,
    check_objects: bool,
) -> list[Problem]:
    return [
        Problem(path, value, found.message, _accepted(allowed, found, permit))
        for path, value in _strings("", tables)
        if value not in known
        and _names_object(path, value)
        and (found := _refusal(path, value, allowed, check_objects=check_objects))
    ]


def _places(tables: Mapping[str, Any]) -> list[Problem]:
    """Settings that may lead to a file or a server outside the run's directory."""
    problems = {}
    for path, value in _strings("", tables):
        if path.startswith("metrics.kwargs."):
            sink, _, key = path.removeprefix("metrics.kwargs.").partition(".")
            named = key.partition(".")[0] in SINK_PLACES.get(sink, ())
            # the key of a table is the end of its path; a sink's name has a colon
            if named or (PLACE.search(value) and not path.endswith(value)):
                accepted = (
                    "the default, which is in the run's directory; or set it in the environment of "
                    "the service, such as MLFLOW_TRACKING_URI"
                )
                problems[path] = Problem(
                    path, value, "names a place, which HTTP may not choose", accepted
                )
        elif path == "run.init_from" and not RUN_NAME.fullmatch(value):
            accepted = "the name of a run of this service, or NAME@best"
            problems[path] = Problem(path, value, "is a path, which HTTP may not choose", accepted)
        elif path == "ray.address" and value not in ("address", *RAY_HERE):  # its key
            message = "is a server, which HTTP may not choose"
            problems[path] = Problem(path, value, message, " or ".join(RAY_HERE))
        elif _as_trained(path).startswith(FREE) and OUTSIDE.search(value):
            accepted = "a relative path without '..'"
            problems[path] = Problem(path, value, "leads out of the run's directory", accepted)
    return list(problems.values())


def _ports(tables: Mapping[str, Any]) -> list[Problem]:
    """Settings that open a port without a key."""
    cluster = tables.get("cluster")
    curve = cluster.get("curve") if isinstance(cluster, Mapping) else tables.get("cluster.curve")
    if curve is None or curve is True:
        return []
    message = "lets processes without a key join the run, which HTTP may not choose"
    return [Problem("cluster.curve", curve, message, "true")]


def _names_object(path: str, value: str) -> bool:
    return ":" in value if _as_trained(path) in NAMES else OBJECT.match(value) is not None


def _as_trained(path: str) -> str:
    """``path``; of a setting of an evaluation's environment that of the same setting of ``env``."""
    return EVALUATED.sub("", path)


class _Refusal(NamedTuple):
    """Why an object may not be imported; ``module``: that would have to be permitted, or ``""``."""

    message: str
    module: str = ""


def _refusal(
    path: str, value: str, allowed: Collection[str], *, check_objects: bool
) -> _Refusal | None:
    """Why ``value`` may not be imported; None if it may."""
    module, _, attribute = (part.strip() for part in value.partition(":"))
    if not _is_allowed(module, allowed):
        return _Refusal("names an object of a module that is not allowed", module)
    if "." in attribute:
        return _Refusal("names an attribute with a dot, which may lead to another module")
    if not check_objects or not attribute.isidentifier():  # an id that the module registers
        return None
    try:
        found = plugins.load_object(f"{module}:{attribute}", path=path)
    except ConfigError:  # reported where the setting is used
        return None
    home = getattr(found, "__module__", None)
    if isinstance(home, str) and _is_allowed(home, allowed):
        return None
    if not isinstance(home, str):
        return _Refusal("names an object that is not a class or a function of an allowed module")
    return _Refusal(f"names an object that is defined in {home!r}, not in an allowed module", home)


def _is_allowed(module: str, allowed: Collection[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def _accepted(allowed: Collection[str], refusal: _Refusal, permit: Permit) -> str:
    modules = f", or an object of {', '.join(sorted(allowed))}" if allowed else ""
    accepted = f"the name of an installed plug-in or registered environment{modules}"
    # a text that is not the name of a module must not become a part of a command
    if MODULE.fullmatch(refusal.module):
        return f"{accepted}; {permit(refusal.module)}"
    return accepted


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
