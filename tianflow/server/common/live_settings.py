"""HTTP resources of live settings: sections of the config, changed by merge patches."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from tianflow.config.imports import at_run, require_allowed
from tianflow.config.model import Config, live_of
from tianflow.config.rules import controllers
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import RunControl
from tianflow.planning.validation import require_settable
from tianflow.plugins import nearest
from tianflow.server.common.problems import ProblemError, json_response

MERGE_PATCH = "application/merge-patch+json"
EXACT = 2**53
"""Up to this number, a float represents every integer exactly."""
TAGS = r'^(\*|(W/)?"[!#-~\x80-\xff]*"( *, *(W/)?"[!#-~\x80-\xff]*")*)$'
"""Syntax of If-Match (RFC 9110, 13.1.1)."""
MOST_VALUES = 64
"""Maximum number of values of a patch, tables included."""
DEEPEST = 8
"""Maximum levels of a patch; settings have at most three."""
RESOURCES: dict[str, tuple[str, ...]] = {
    "actors": ("actors",),
    "balance": ("balance",),
    "env": ("env",),
    "evaluation": ("evaluation",),
    "inference": ("inference",),
    "learner": ("algorithm", "learner"),
    "replay": ("replay",),
    "weights": ("weights",),
}
"""Sections of the config behind each resource."""
TRIAL_S = 4.0
"""Limit of the trial of a change on a new environment. A service waits 5 seconds for an answer."""
FREE: dict[str, tuple[str, ...]] = {"env": ("set",)}
"""Settings of a resource whose values have any form."""


def show(run: RunControl, resource: str) -> web.Response:
    """The live settings of ``resource``, with their generation as ETag."""
    return json_response(
        live_values(run.config, resource),
        headers={"ETag": f'"{run.generation}"', "Accept-Patch": MERGE_PATCH},
    )


def live_values(config: Config, resource: str) -> dict[str, Any]:
    """Name and value of every live setting of ``resource``."""
    dumped = {
        section: getattr(config, section).model_dump(mode="json") for section in RESOURCES[resource]
    }
    live = live_of(config)
    return {key: values[key] for section, values in dumped.items() for key in live[section]}


async def patch(
    run: RunControl, resource: str, request: web.Request, *, trial: asyncio.Lock
) -> web.Response:
    """Apply a merge patch, all or nothing, and return the settings. ``trial`` is held while a
    change is tried on a new environment.

    Raises:
        ProblemError: 400 malformed body or If-Match, 412 another generation, 415 not a merge patch,
            422 not an object.
        ConfigError: a value or key is refused; nothing changed.
        StateConflictError: the run has ended.
    """
    if request.content_type != MERGE_PATCH:
        detail = f"The body must be a merge patch, with the type {MERGE_PATCH}."
        raise ProblemError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail, headers={"Accept-Patch": MERGE_PATCH}
        )
    body = parse(await request.read(), free=FREE.get(resource, ()))
    if not isinstance(body, dict):
        raise ConfigError(
            [Problem(resource, body, "is not a merge patch", "an object of settings")]
        )
    check_depth(resource, body)
    check_size(resource, body)
    # in a thread, because it may import a module
    await asyncio.to_thread(
        require_allowed,
        {resource: body},
        run.config.http.allowed_imports,
        known=controllers(run.config),
        permit=at_run,
    )
    _check_generation(request, run.generation)
    changes = changes_of(run.config, resource, body)
    if "env" in changes:
        async with trial:
            await asyncio.to_thread(require_settable, run.config, changes, limit_s=TRIAL_S)
        _check_generation(request, run.generation)  # a change may have come meanwhile
    if body:
        run.change(changes, source=f"http:{request.remote}")
    return show(run, resource)


def changes_of(
    config: Config, resource: str, body: Mapping[str, object]
) -> dict[str, dict[str, object]]:
    """Split the patch by sections. An unknown key goes to the section of the nearest name, so that
    the refusal shows that name.
    """
    sections, live = RESOURCES[resource], live_of(config)
    home = {key: section for section in reversed(sections) for key in live[section]}
    changes: dict[str, dict[str, object]] = {}
    for key, value in body.items():
        section = home.get(key) or home.get(nearest(key, tuple(home)), sections[0])
        changes.setdefault(section, {})[key] = value
    return changes


def parse(body: bytes, *, free: Collection[str] = ()) -> object:
    """Parse a JSON body. ProblemError 400 if it is not valid, or has a duplicate key.

    Args:
        body: of a request.
        free: paths below which 2.0 stays a float. Elsewhere it is an integer, as JSON has it, and
            as some languages write integers.
    """
    try:
        found = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, f"The body is not JSON: {error}.") from error
    return _with_integers(found, free)


def _with_integers(document: object, free: Collection[str]) -> object:
    """``document`` with integers for floats such as 2.0, except below the paths ``free``. It does
    not recurse: documents may be nested to any level here.
    """
    found = {"": document}
    left: list[tuple[str, Any]] = [("", found)]
    while left:
        path, inner = left.pop()
        for key, value in inner.items() if isinstance(inner, dict) else enumerate(inner):
            where = path if isinstance(inner, list) else f"{path}.{key}".strip(".")
            if any(where == below or where.startswith(f"{below}.") for below in free):
                continue
            if isinstance(value, dict | list):
                left.append((where, value))
            elif isinstance(value, float) and abs(value) <= EXACT and value.is_integer():
                inner[key] = int(value)
    return found[""]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def check_depth(path: str, value: object, deepest: int = DEEPEST) -> None:
    """Refuse a value of more than ``deepest`` levels with ConfigError, because later code recurses
    into it.
    """
    level, depth = [value], 0
    while level:
        if depth > deepest:
            raise ConfigError(
                [Problem(path, None, "is nested too deeply", f"at most {deepest} levels")]
            )
        inner = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        ]
        level, depth = [item for items in inner for item in items], depth + 1


def check_size(path: str, value: object) -> None:
    """Refuse a patch of more than `MOST_VALUES` values with ConfigError: each may cost a search for
    the nearest name, on the loop of the coordinator.
    """
    level: list[object] = [value]
    count = 0
    while level:
        item = level.pop()
        count += 1
        if count > MOST_VALUES:
            raise ConfigError(
                [Problem(path, None, "has too many values", f"at most {MOST_VALUES} values")]
            )
        if isinstance(item, dict | list):
            level.extend(item.values() if isinstance(item, dict) else item)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON number")


def _check_generation(request: web.Request, generation: int) -> None:
    wanted = ", ".join(request.headers.getall("If-Match", ())).strip()
    if "If-Match" in request.headers and not re.match(TAGS, wanted):
        raise ProblemError(
            HTTPStatus.BAD_REQUEST,
            'If-Match is not a valid list of ETags; accepted: quoted strings such as "3", or *.',
        )
    if wanted in {"", "*"}:
        return
    # Strong comparison: a weak tag (W/"3") never matches.
    tags = [tag for weak, tag in re.findall(r'(W/)?"([^"]*)"', wanted) if not weak]
    if str(generation) not in tags:
        detail = f"The settings have changed to generation {generation}; read them again."
        raise ProblemError(
            HTTPStatus.PRECONDITION_FAILED, detail, headers={"ETag": f'"{generation}"'}
        )
