"""Conversion of pydantic's errors to `Problem`: path, value, accepted values, nearest known key."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tianflow import plugins
from tianflow.config.off_policy import ABSENT
from tianflow.errors import Problem

NULL_WORDS = frozenset({"", "~", "none", "null", "nil", "nothing", "undefined"})
"""Words that users write for a missing value."""
MOST_SEARCHES = 64
"""Number of problems for which the nearest name is searched. A search takes a millisecond, and a
config from HTTP may have thousands of unknown keys.
"""
_BOUNDS = {
    "greater_than": ">",
    "greater_than_equal": ">=",
    "less_than": "<",
    "less_than_equal": "<=",
}
_SECTION = "is a section, not a setting", "a table of settings, or section.key=value"
_MAIN = {
    "actors": "actors.count",
    "algorithm": "algorithm.name",
    "env": "env.id",
    "network": "network.name",
    "balance": "balance.max_staleness",
    "learner": "learner.device",
    "inference": "inference.servers",
    "placement": "placement.launcher",
}
"""The setting that is meant where a section gets a value."""
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table of settings",
}


def problems_of(
    error: ValidationError, model: type[BaseModel], *, algorithm: str = ""
) -> list[Problem]:
    """One `Problem` per setting in ``error``; alternatives of one setting are merged.

    ``algorithm``: the given name. A plug-in may have the settings model of another algorithm.
    """
    found: dict[str, Problem] = {}
    for number, details in enumerate(error.errors(include_url=False)):
        keys = _keys(details["loc"], model)
        problem = _problem(details, keys, model, algorithm=algorithm, search=number < MOST_SEARCHES)
        earlier = found.get(problem.path)
        if earlier is None:
            found[problem.path] = problem
        elif problem.accepted and problem.accepted not in earlier.accepted:
            accepted = f"{earlier.accepted}, or {problem.accepted}"
            message = earlier.message if earlier.message == problem.message else "is not accepted"
            found[problem.path] = Problem(
                problem.path, earlier.value, message, accepted, earlier.nearest or problem.nearest
            )
    return [_with_null(problem, model) for problem in found.values()]


def innermost(problems: Iterable[Problem]) -> list[Problem]:
    """One problem per path, the last one. Problems of a parent path are dropped."""
    found = {problem.path: problem for problem in problems}
    parents = {path[:end] for path in found for end, sign in enumerate(path) if sign == "."}
    return [problem for path, problem in found.items() if path not in parents]


def unknown_key(
    model: type[BaseModel],
    keys: Sequence[str],
    value: object,
    live: Mapping[str, Sequence[str]] | None = None,
    *,
    algorithm: str = "",
    search: bool = True,
) -> Problem:
    """The problem of an unknown setting at ``keys``.

    It names the nearest key in the same section, or the same key in another section.

    Args:
        model: root of the settings.
        keys: path of the setting.
        value: the value given.
        live: settings that would be accepted, by section; None: all of ``model``.
        algorithm: that the settings of the section ``algorithm`` belong to.
        search: look for the nearest key.
    """
    *parents, key = keys
    section = _section(model, parents)
    known = (
        tuple(live if not parents else live.get(parents[0], ()))
        if live is not None
        else tuple(_settings(section))
    )
    nearest = ""
    if search:
        # Without a section, the same key in one is meant; with a section, a slip in its own keys.
        elsewhere, close = path_with(model, key, except_=parents), plugins.nearest(key, known)
        nearest = (close or elsewhere) if parents else (elsewhere or close)
    accepted = "one of " + ", ".join(sorted(known)) if known else ""
    # a config may switch the algorithm
    owner = f" of {algorithm}" if algorithm and parents == ["algorithm"] else ""
    return Problem(".".join(keys), value, f"is not a setting{owner}", accepted, nearest)


def path_with(model: type[BaseModel], key: str, *, except_: Sequence[str] = ()) -> str:
    """Path of the first setting called ``key`` in a section of ``model``; "" without one."""
    for name, field in model.model_fields.items():
        if [name] != list(except_) and key in getattr(field.annotation, "model_fields", {}):
            return f"{name}.{key}"
    return ""


def _settings(section: type[BaseModel] | None) -> list[str]:
    """Names of the fields of ``section`` that are settings, see `ABSENT`."""
    fields = {} if section is None else section.model_fields
    return [name for name, field in fields.items() if not field.exclude]


def _problem(
    details: ErrorDetails,
    keys: list[str],
    model: type[BaseModel],
    *,
    algorithm: str,
    search: bool,
) -> Problem:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    path = ".".join(keys)
    if kind in {"extra_forbidden", ABSENT}:
        return unknown_key(model, keys, value, algorithm=algorithm, search=search)
    if kind == "missing":
        section = _section(model, keys)
        accepted = (
            "" if section is None else f"a section [{path}] with " + ", ".join(_required(section))
        )
        return Problem(path, None, "is required", accepted)
    if kind == "model_type" and path in _MAIN:
        return Problem(path, value, _SECTION[0], _SECTION[1], _MAIN[path])
    if kind in _BOUNDS:
        return Problem(
            path,
            value,
            "is out of range",
            f"a number {_BOUNDS[kind]} {next(iter(context.values()))}",
        )
    if kind == "literal_error":
        choices = tuple(re.findall(r"'([^']*)'", context["expected"]))
        return Problem(
            path,
            value,
            "is not a valid choice",
            context["expected"],
            plugins.nearest(str(value), choices),
        )
    if kind == "string_pattern_mismatch":
        return Problem(path, value, "has the wrong form", f"a string like {context['pattern']}")
    if kind == "value_error" and isinstance(value, dict):  # a combination within one section
        return Problem(path, None, str(context["error"]))
    if kind == "value_error":
        return Problem(path, value, "has the wrong form", str(context["error"]))
    if kind == "finite_number":
        return Problem(path, value, "is not finite", "a finite number")
    wanted = _KINDS.get(kind.split("_", maxsplit=1)[0])
    if wanted is not None and kind.endswith(("_type", "_parsing", "_from_float")):
        return Problem(path, value, "is of the wrong type", wanted + _quotes(wanted, value))
    return Problem(path, value, details["msg"])


def _quotes(wanted: str, value: object) -> str:
    """Advice for text that looks like the ``wanted`` list or table, but is not TOML; else ""."""
    opening = {"a list": "[", "a table": "{"}.get(wanted)
    if not (isinstance(value, str) and opening and value.lstrip().startswith(opening)):
        return ""
    words = [word.strip() for word in value.strip(" []").split(",")]
    example = ", ".join(f'"{word}"' for word in words)
    shown = wanted == "a list" and all(re.fullmatch(r"[A-Za-z_][\w.:-]*", word) for word in words)
    return " in TOML, where texts need quotes" + (f": '[{example}]'" if shown else "")


def _with_null(problem: Problem, model: type[BaseModel]) -> Problem:
    """``problem`` with the spelling of null, if its value looks like an attempt to write it."""
    if not (isinstance(problem.value, str) and problem.value.strip().lower() in NULL_WORDS):
        return problem
    *parents, key = problem.path.split(".")
    section = _section(model, parents)
    field = None if section is None else section.model_fields.get(key)
    if field is None or field.is_required():
        return problem
    outcome = "for no value" if field.default is None else "for the default"
    accepted = ", or ".join(
        part for part in (problem.accepted, f"null {outcome} (in a file: omit the line)") if part
    )
    return Problem(problem.path, problem.value, problem.message, accepted, problem.nearest)


def _keys(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Names of the settings along ``location``, without the union members that pydantic inserts."""
    keys: list[str] = []
    current: Any = model
    for position, part in enumerate(location):
        if isinstance(current, type) and issubclass(current, BaseModel):
            keys.append(str(part))
            field = current.model_fields.get(str(part))
            current = field.annotation if field is not None else None
        elif (member := _table(current)) is not None and part == member.__name__:
            current = member
        elif isinstance(part, int):
            keys.append(str(part))
        elif (inner := _tables(current)) is not None:
            keys.append(part)
            if location[position + 1 :] == ("[key]",):
                break
            current = inner
        elif get_origin(_bare(current)) is dict and position == len(location) - 1:
            keys.append(part)
    return keys


def _bare(annotation: Any) -> Any:
    """The annotation without `Annotated`, reduced to its first alternative other than None."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        return next(_bare(member) for member in get_args(annotation) if member is not type(None))
    return annotation


def _table(annotation: Any) -> type[BaseModel] | None:
    """The model among the alternatives of ``annotation``, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    alternatives = get_args(annotation)
    if get_origin(annotation) is Annotated:
        alternatives = alternatives[:1]
    elif get_origin(annotation) not in {Union, types.UnionType}:
        return None
    return next((found for each in alternatives if (found := _table(each)) is not None), None)


def _tables(annotation: Any) -> type[BaseModel] | None:
    """The model of the values, if ``annotation`` is a table of tables with any names."""
    bare = _bare(annotation)
    return _table(get_args(bare)[1]) if get_origin(bare) is dict else None


def _section(model: type[BaseModel], keys: Sequence[str]) -> type[BaseModel] | None:
    """The model of the table at ``keys``, if it is one."""
    current: Any = model
    for key in keys:
        table = _table(current)
        field = None if table is None else table.model_fields.get(key)
        current = _tables(current) if table is None else field and field.annotation
    return _table(current)


def _required(section: type[BaseModel]) -> list[str]:
    return [name for name, field in section.model_fields.items() if field.is_required()]
