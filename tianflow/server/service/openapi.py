"""`/openapi.json` of a service: what every server answers, with submission, lists by the page, and
runs that do not go on.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Any

from tianflow.config.loading import shipped
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config, EnvSettings
from tianflow.server.common import openapi
from tianflow.server.common.openapi import JSON, RUN, answered, operation, reading
from tianflow.server.common.schemas import (
    COUNT,
    NUMBER,
    TEXT,
    TRUTH,
    Schema,
    listing,
    nullable,
    reference,
    struct,
)
from tianflow.server.service.store import STATES

ANY_OBJECT: Schema = {"type": "object"}
A_KEY = "^[ -~]{1,255}$"


@cache
def document(*, looks: tuple[str, ...], actions: tuple[str, ...]) -> dict[str, Any]:
    """The whole document. It is always the same: made once, and not to be changed."""
    known = [
        Config(env=EnvSettings(id="-"), algorithm=model.model_validate({"name": name}))
        for name, model in BUILT_IN_ALGORITHMS.items()
    ]
    made = openapi.document(
        {}, looks=looks, actions=actions, more=_paths() | openapi.resources(known, others=True)
    )
    made["info"]["summary"] = "Submission, state and control of training runs"
    for path, item in made["paths"].items():
        if "{run}" in path:
            for described in item.values() if isinstance(item, dict) else ():
                if isinstance(described, dict):  # a run may wait, start, or have ended
                    described["responses"].setdefault("409", {"$ref": "#/components/responses/409"})
    return made


def _paths() -> dict[str, Any]:
    listed = struct(runs=listing(_short()), next=nullable(TEXT), can_submit=TRUTH)
    runs = reading(
        "/api/v1/runs", "Runs in short, newest first, a page at a time", answered("Runs", listed)
    )
    for described in runs.values():
        described["parameters"] = [
            _query("limit", "Runs in one answer", 1, 500),
            _query("before", "Runs that came before this number", 1, 2**62),
        ]
    return {
        "/api/v1/runs": {**runs, "post": _submit()},
        RUN: reading(
            RUN,
            "Everything a status screen needs",
            answered("The run", {"anyOf": [reference("Run"), _resting()]}),
        ),
        f"{RUN}/log": reading(
            f"{RUN}/log",
            "The last lines that the run's process printed",
            answered("Lines", TEXT, "text/plain"),
        ),
    }


def _submit() -> dict[str, Any]:
    config = {
        "anyOf": [
            ANY_OBJECT | {"description": "Sections, as in a file"},
            TEXT
            | {
                "description": "Name of a config that comes with tianflow",
                "enum": sorted(shipped()),
            },
        ]
    }
    body = {
        "type": "object",
        "properties": {
            "config": config,
            "overrides": ANY_OBJECT
            | {"description": "Values by dotted path, such as balance.max_staleness"},
        },
        "required": ["config"],
        "additionalProperties": False,
    }
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "Sent again with the same body, it gives the run of the first time",
        "schema": {"type": "string", "pattern": A_KEY},
    }
    headers = {"Location": {"description": "The run", "schema": {"type": "string"}}}
    return operation(
        "/api/v1/runs",
        "post",
        "Take a run, and start it when there is room",
        answered("Taken", _short(), headers=headers),
        *(409, 415, 422),
        status=HTTPStatus.CREATED.value,
        parameters=[key],
        requestBody={"required": True, "content": {JSON: {"schema": body}}},
    )


def _state() -> dict[str, Schema]:
    states = {"type": "string", "examples": [*STATES, "paused", "draining"]}
    times = dict.fromkeys(("started", "ended"), nullable(NUMBER))
    return {
        "id": TEXT,
        "state": states,
        "ready": TRUTH,
        "reasons": listing(TEXT),
        "href": TEXT,
        "submitted": NUMBER,
        **times,
    }


def _short() -> Schema:
    return struct(**_state()) | {"additionalProperties": True}


def _resting() -> Schema:
    return struct(**_state(), summary=nullable(reference("Summary"))) | {
        "description": "A run that waits, starts, or has ended"
    }


def _query(name: str, description: str, least: int, most: int) -> dict[str, Any]:
    return {
        "name": name,
        "in": "query",
        "description": description,
        "schema": {**COUNT, "minimum": least, "maximum": most},
    }
