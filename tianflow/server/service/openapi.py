"""`/openapi.json` of a service: the API of a run, with submission, lists in pages, and runs that do
not train now.
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
def document(*, parts: tuple[str, ...], actions: tuple[str, ...]) -> dict[str, Any]:
    """The document. It is cached, so callers must not change it."""
    known = [
        Config(env=EnvSettings(id="-"), algorithm=model.model_validate({"name": name}))
        for name, model in BUILT_IN_ALGORITHMS.items()
    ]
    made = openapi.document(
        {}, parts=parts, actions=actions, more=_paths() | openapi.resources(known, others=True)
    )
    made["info"]["summary"] = "Submission, state and control of training runs"
    for path, item in made["paths"].items():
        if "{run}" in path:
            for described in item.values() if isinstance(item, dict) else ():
                if isinstance(described, dict):  # the run may be pending, starting or ended
                    described["responses"].setdefault("409", {"$ref": "#/components/responses/409"})
    return made


def _paths() -> dict[str, Any]:
    listed = struct(
        runs=listing(_short()),
        next=nullable(TEXT),
        on_disk=listing(_on_disk()),
        on_disk_more=COUNT | {"description": "Runs on disk that are not listed"},
        can_submit=TRUTH,
    )
    runs = reading(
        "/api/v1/runs", "Runs in brief, newest first, in pages", answered("Runs", listed)
    )
    for described in runs.values():
        described["parameters"] = [
            _query("limit", "Maximum number of runs", 1, 500),
            _query("before", "Only runs with a smaller number", 1, 2**62),
        ]
    return {
        "/api/v1/configs": reading(
            "/api/v1/configs",
            "Shipped configs, as text",
            answered(
                "Configs", struct(configs=listing(struct(name=TEXT, summary=TEXT, toml=TEXT)))
            ),
        ),
        "/api/v1/runs": {**runs, "post": _submit()},
        RUN: reading(
            RUN,
            "Run document",
            answered("The run", {"anyOf": [reference("Run"), _resting(), _on_disk()]}),
        )
        | {"delete": _delete()},
        f"{RUN}/log": reading(
            f"{RUN}/log",
            "Last lines of the output of the run's process",
            answered("Lines", TEXT, "text/plain"),
        ),
    }


def _delete() -> dict[str, Any]:
    return operation(
        RUN,
        "delete",
        "Delete an ended run with its directory and log; repeating it is not an error",
        answered("Deleted", reference("Action")),
        409,
    )


def _submit() -> dict[str, Any]:
    config = {
        "anyOf": [
            ANY_OBJECT | {"description": "Sections as in a config file"},
            TEXT
            | {
                "description": "Name of a shipped config",
                "enum": sorted(shipped()),
            },
        ]
    }
    overrides = ANY_OBJECT | {"description": "Values by path, such as balance.max_staleness"}
    toml = TEXT | {"description": "Text of a config file"}
    body = {
        "anyOf": [
            struct(["overrides"], config=config, overrides=overrides),
            struct(["overrides"], toml=toml, overrides=overrides),
        ]
    }
    check = {
        "name": "check",
        "in": "query",
        "description": "Only check the config, and start nothing. environment: it is made, too",
        "schema": {"type": "string", "enum": ["settings", "environment"]},
    }
    checked = struct(valid=TRUTH, environment=TEXT, algorithm=TEXT, advice=listing(TEXT))
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "Key of the submission; the same key and body return the same run",
        "schema": {"type": "string", "pattern": A_KEY},
    }
    headers = {"Location": {"description": "The run", "schema": {"type": "string"}}}
    made = operation(
        "/api/v1/runs",
        "post",
        "Submit a run; it starts when the service has room",
        answered("Submitted", _short(), headers=headers),
        *(409, 415, 422),
        status=HTTPStatus.CREATED.value,
        parameters=[key, check],
        requestBody={"required": True, "content": {JSON: {"schema": body}}},
    )
    made["responses"]["200"] = answered("The config is valid; nothing was submitted", checked)
    return made


def _state() -> dict[str, Schema]:
    states = {"type": "string", "examples": [*STATES, "paused", "draining"]}
    times = dict.fromkeys(("started", "ended"), nullable(NUMBER))
    return {
        "id": TEXT,
        "state": states,
        "ready": TRUTH,
        "reasons": listing(TEXT),
        "href": TEXT,
        "environment": nullable(TEXT),
        "algorithm": nullable(TEXT),
        "submitted": NUMBER,
        **times,
    }


def _short() -> Schema:
    return struct(**_state()) | {"additionalProperties": True}


def _resting() -> Schema:
    return struct(**_state(), summary=nullable(reference("Summary"))) | {
        "description": "A run that is pending, starting or ended"
    }


def _on_disk() -> Schema:
    """Of a list, and full: then with a summary."""
    elapsed = nullable(NUMBER) | {"description": "Seconds that the history covers"}
    listed = struct(**_state() | {"submitted": {"type": "null"}}, elapsed_s=elapsed, on_disk=TRUTH)
    return listed | {
        "additionalProperties": True,
        "description": "A run on disk that the store does not know; it can only be read",
    }


def _query(name: str, description: str, least: int, most: int) -> dict[str, Any]:
    return {
        "name": name,
        "in": "query",
        "description": description,
        "schema": {**COUNT, "minimum": least, "maximum": most},
    }
