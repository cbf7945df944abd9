"""Live settings as HTTP resources: which part of the config each one shows, and how a merge patch
becomes a change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from tianflow.config.model import Config, live_of
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import RunControl
from tianflow.plugins import nearest
from tianflow.server.common.problems import ProblemError, json_response

MERGE_PATCH = "application/merge-patch+json"
EXACT = 2**53
"""Up to here, a float is every whole number exactly."""
TAGS = r'^(\*|(W/)?"[!#-~\x80-\xff]*"( *, *(W/)?"[!#-~\x80-\xff]*")*)$'
"""What If-Match may be (RFC 9110, 13.1.1)."""
DEEPEST = 8
"""Levels of a patch; no setting has more than three."""
RESOURCES: dict[str, tuple[str, ...]] = {
    "actors": ("actors",),
    "balance": ("balance",),
    "evaluation": ("evaluation",),
    "learner": ("algorithm", "learner"),
    "replay": ("replay",),
    "weights": ("weights",),
}
"""Sections of the config behind each resource."""


def show(run: RunControl, resource: str) -> web.Response:
    """The settings of ``resource`` that can be changed, with the generation in force as ETag."""
    return json_response(
        live_values(run.config, resource),
        headers={"ETag": f'"{run.generation}"', "Accept-Patch": MERGE_PATCH},
    )


def live_values(config: Config, resource: str) -> dict[str, Any]:
    """Name and value of every setting of ``resource`` that can be changed."""
    dumped = {
        section: getattr(config, section).model_dump(mode="json") for section in RESOURCES[resource]
    }
    live = live_of(config)
    return {key: values[key] for section, values in dumped.items() for key in live[section]}


async def patch(run: RunControl, resource: str, request: web.Request) -> web.Response:
    """Apply a merge patch, whole or not at all; the settings then in force.

    Raises:
        ProblemError: 400 malformed body or If-Match, 412 made for another generation, 415 not a
            merge patch, 422 not an object.
        ConfigError: a value or key is refused; nothing changed.
        StateConflictError: the run has ended.
    """
    if request.content_type != MERGE_PATCH:
        detail = f"A change is a merge patch, of type {MERGE_PATCH}."
        raise ProblemError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail, headers={"Accept-Patch": MERGE_PATCH}
        )
    body = parse(await request.read())
    if not isinstance(body, dict):
        raise ConfigError(
            [Problem(resource, body, "is not a merge patch", "an object of settings")]
        )
    _check_generation(request, run.generation)
    check_depth(resource, body)
    if body:
        run.change(changes_of(run.config, resource, body), source=f"http:{request.remote}")
    return show(run, resource)


def changes_of(
    config: Config, resource: str, body: Mapping[str, object]
) -> dict[str, dict[str, object]]:
    """The patch by sections. An unknown key goes where its nearest relative is, so that the refusal
    names that one.
    """
    sections, live = RESOURCES[resource], live_of(config)
    home = {key: section for section in reversed(sections) for key in live[section]}
    changes: dict[str, dict[str, object]] = {}
    for key, value in body.items():
        section = home.get(key) or home.get(nearest(key, tuple(home)), sections[0])
        changes.setdefault(section, {})[key] = value
    return changes


def parse(body: bytes) -> object:
    """A body of JSON. ProblemError 400 when it is none, or names a key twice."""
    try:
        return json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_number,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError) as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, f"The body is not JSON: {error}.") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def check_depth(path: str, value: object, deepest: int = DEEPEST) -> None:
    """Refuse what has more than ``deepest`` levels, as no setting has, with ConfigError: what comes
    next goes down them one by one.
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


def _number(text: str) -> float:
    """2.0 is a whole number to JSON, and the only way some languages write one."""
    value = float(text)
    return int(value) if abs(value) <= EXACT and value.is_integer() else value


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON number")


def _check_generation(request: web.Request, generation: int) -> None:
    wanted = ", ".join(request.headers.getall("If-Match", ())).strip()
    if "If-Match" in request.headers and not re.match(TAGS, wanted):
        raise ProblemError(
            HTTPStatus.BAD_REQUEST,
            'If-Match is no list of ETags, such as "3": it is a string in quotation marks, or *.',
        )
    if wanted in {"", "*"}:
        return
    # Strong comparison: a weak tag (W/"3") never matches.
    tags = [tag for weak, tag in re.findall(r'(W/)?"([^"]*)"', wanted) if not weak]
    if str(generation) not in tags:
        detail = f"The settings have moved on to generation {generation}: read them again."
        raise ProblemError(
            HTTPStatus.PRECONDITION_FAILED, detail, headers={"ETag": f'"{generation}"'}
        )
