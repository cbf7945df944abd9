"""`/openapi.json`: the HTTP API as an OpenAPI 3.1 document, made from the models that check it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from tianflow import __version__
from tianflow.config.model import Config
from tianflow.rundir.audit_log import MOST
from tianflow.rundir.history import LIMIT
from tianflow.server.common import history, pages, schemas
from tianflow.server.common.auth import OPEN, OPEN_ON_LOOPBACK
from tianflow.server.common.live_settings import MERGE_PATCH, RESOURCES, TAGS
from tianflow.server.common.schemas import Schema, reference

RUN = "/api/v1/runs/{run}"
JSON = "application/json"
PROBLEM = "application/problem+json"
ETAG: Schema = {
    "description": "Generation of the settings in force",
    "required": True,
    "schema": {"type": "string"},
}
RETRY_AFTER: Schema = {
    "description": "Seconds to wait before the next request",
    "schema": {"type": "integer", "minimum": 1},
}
REFUSALS: dict[int, str] = {
    400: "The request cannot be read",
    401: "A token is missing or wrong",
    403: "The token allows reading only, or the request comes from a page of another origin",
    404: "The run does not exist",
    408: "The body did not arrive in time",
    409: "The run has ended or is ending",
    412: "The settings are of another generation now",
    413: "The body is too large",
    415: "The body is not a merge patch",
    421: "The server does not accept this host name",
    422: "Settings were refused; nothing changed",
    429: "Too many requests from this address",
    500: "Unexpected error; the log has details",
    503: "Not available now",
}
ALWAYS = (400, 403, 408, 413, 421, 429, 500, 503)
HEADERS: dict[int, dict[str, Schema]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    412: {"ETag": ETAG},
    415: {"Accept-Patch": {"schema": {"type": "string"}}},
    429: {"Retry-After": RETRY_AFTER},
    503: {"Retry-After": RETRY_AFTER},
}


def document(
    runs: Mapping[str, Config],
    *,
    parts: Iterable[str],
    actions: Iterable[str],
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document for ``runs`` (settings by id). For different algorithms, a resource has the
    settings of either.

    ``more``: operations by path, besides or instead of those that every server has.
    """
    paths = {
        **_server(),
        **_part_paths(parts),
        **_actions(actions),
        **_events(),
        **resources(tuple(runs.values())),
        **(more or {}),
    }
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "tianflow",
            "version": __version__,
            "summary": "State and control of training runs",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"token": []}],
        "paths": {path: _with_parameters(path, item) for path, item in paths.items()},
        "components": {
            "schemas": schemas.named(),
            "responses": {str(status): _refusal(status) for status in REFUSALS},
            "parameters": {"run": _run_parameter(tuple(runs))},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Token of control.json; its read_token is enough for GET",
                }
            },
        },
    }


def _run_parameter(names: Sequence[str]) -> dict[str, Any]:
    schema: Schema = {
        "type": "string",
        "minLength": 1,
        **({"examples": list(names)} if names else {}),
    }
    return {
        "name": "run",
        "in": "path",
        "required": True,
        "description": "Id of a run",
        "schema": schema,
    }


def _refusal(status: int) -> dict[str, Any]:
    return {
        "description": REFUSALS[status],
        "content": {PROBLEM: {"schema": reference("Problem")}},
        "headers": HEADERS.get(status, {}),
    }


def _with_parameters(path: str, item: dict[str, Any]) -> dict[str, Any]:
    return (
        {"parameters": [{"$ref": "#/components/parameters/run"}], **item}
        if "{run}" in path
        else item
    )


def operation(
    path: str,
    method: str,
    summary: str,
    answer: Mapping[str, Any],
    *refusals: int,
    status: int = 200,
    **more: Any,
) -> dict[str, Any]:
    """One operation: its answer, and the statuses of refusals."""
    looking = method in {"get", "head"}
    refused = {
        *ALWAYS,
        *refusals,
        *(() if looking and path in OPEN else (401,)),
        *((404,) if "{run}" in path else ()),
    }
    made: dict[str, Any] = {
        "operationId": "-".join(
            [method, *path.replace("{run}", "run").replace(".json", "").strip("/").split("/")]
        ).rstrip("-"),
        "summary": summary,
        "responses": {
            str(status): dict(answer),
            **{str(code): {"$ref": f"#/components/responses/{code}"} for code in sorted(refused)},
        },
        **more,
    }
    if looking and path in OPEN:
        made["security"] = []
    elif looking and path in OPEN_ON_LOOPBACK:
        made["security"] = [{}, {"token": []}]
    return made


def reading(path: str, summary: str, answer: Mapping[str, Any], *refusals: int) -> dict[str, Any]:
    """GET, and HEAD with the same answer without its body."""
    bare = {key: value for key, value in answer.items() if key != "content"}
    return {
        "get": operation(path, "get", summary, answer, *refusals),
        "head": operation(path, "head", summary, bare, *refusals),
    }


def answered(
    description: str, schema: Schema, content_type: str = JSON, headers: Schema | None = None
) -> dict[str, Any]:
    """Answer with a body."""
    return {
        "description": description,
        "content": {content_type: {"schema": schema}},
        **({"headers": headers} if headers else {}),
    }


def _server() -> dict[str, Any]:
    text = schemas.TEXT
    alive = answered("The coordinator is alive", schemas.struct(alive=schemas.TRUTH))
    ready = answered("Training can proceed", schemas.struct(ready=schemas.TRUTH))
    metrics = answered("Every metric", text, "text/plain")
    metrics["content"]["application/openmetrics-text"] = {"schema": text}
    return {
        "/": reading("/", "Console for a browser", answered("A page", text, "text/html")),
        "/livez": reading("/livez", "Liveness of the process", alive),
        "/readyz": reading("/readyz", "Readiness: training can proceed", ready),
        "/metrics": reading(
            "/metrics", "Metrics as Prometheus text or OpenMetrics, as Accept asks", metrics
        ),
        "/openapi.json": reading(
            "/openapi.json", "This document", answered("An OpenAPI document", {"type": "object"})
        ),
        "/api/v1/runs": reading(
            "/api/v1/runs", "Every run in brief", answered("Runs", reference("Runs"))
        ),
        RUN: reading(RUN, "Run document", answered("The run", reference("Run"))),
    }


def _part_paths(parts: Iterable[str]) -> dict[str, Any]:
    diagnosis = schemas.named()["Diagnosis"]
    rows = schemas.listing(reference("HistoryRow"))
    answers = {
        "components": (
            "Every component with its measures",
            schemas.struct(components=schemas.listing(reference("Component"))),
        ),
        "nodes": (
            "Every node, for a run on several machines",
            schemas.struct(nodes=schemas.listing(reference("Node"))),
        ),
        "config": (
            "Settings in force that have an effect on training, by section",
            schemas.struct(config=schemas.table({"type": "object"})),
        ),
        "diagnosis": (
            "Bottleneck of the run",
            schemas.struct(id=schemas.TEXT, **diagnosis["properties"]),
        ),
        "audit": ("Changes and actions, oldest first, in pages", _audit()),
        "checkpoints": (
            "Checkpoints, newest first",
            schemas.struct(checkpoints=schemas.listing(reference("Checkpoint"))),
        ),
        "history": (
            "History of the run, oldest first",
            schemas.struct(history=rows, time=schemas.NUMBER),
        ),
    }
    paths = {f"{RUN}/{part}": answers[part] for part in parts}
    found = {
        path: reading(path, summary, answered(summary, schema))
        for path, (summary, schema) in paths.items()
    }
    for described in found.get(f"{RUN}/history", {}).values():
        described["parameters"] = [_points()]
    for described in found.get(f"{RUN}/audit", {}).values():
        described["parameters"] = _page()
    return found


def _audit() -> Schema:
    return schemas.struct(
        audit=schemas.listing(reference("AuditEntry")),
        next=schemas.nullable({"type": "integer", "minimum": 1}),
    )


def _page() -> list[dict[str, Any]]:
    whole = {"type": "integer"}
    return [
        {
            "name": "before",
            "in": "query",
            "description": "The next of an answer, for the page before; without it the newest page",
            "schema": whole | {"minimum": 0, "maximum": pages.FURTHEST},
        },
        {
            "name": "limit",
            "in": "query",
            "description": "Maximum number of records",
            "schema": whole | {"minimum": 1, "maximum": MOST, "default": MOST},
        },
    ]


def _points() -> dict[str, Any]:
    schema = {
        "type": "integer",
        "minimum": history.FEWEST,
        "maximum": LIMIT,
        "default": history.USUAL,
    }
    return {
        "name": "points",
        "in": "query",
        "description": "Maximum number of rows; neighbours are merged until they fit",
        "schema": schema,
    }


def _actions(actions: Iterable[str]) -> dict[str, Any]:
    headers = {"Location": {"description": "The run", "schema": {"type": "string"}}}
    answer = answered(
        "Accepted, with the state that it leads to", reference("Action"), headers=headers
    )
    return {
        f"{RUN}/{action}": {
            "post": operation(
                f"{RUN}/{action}",
                "post",
                f"{action.capitalize()} the run; repeating it is not an error",
                answer,
                409,
                status=HTTPStatus.ACCEPTED.value,
            )
        }
        for action in actions
    }


def _events() -> dict[str, Any]:
    path = f"{RUN}/events"
    parameters = [
        {
            "name": "Last-Event-ID",
            "in": "header",
            "description": "Number of the last event received; 0 for all events in the buffer. "
            "Without it only new events are sent",
            "schema": {"type": "string", "pattern": "^[0-9]{0,18}$"},
        },
        {
            "name": "follow",
            "in": "query",
            "description": "false: send the events in the buffer and end",
            "schema": {"type": "string", "enum": ["true", "false"], "default": "true"},
        },
    ]
    answer: dict[str, Any] = {
        "description": "Server-sent events. id: a number that rises by one; event: its kind; data: "
        "a JSON object, described in x-events",
        "content": {"text/event-stream": {}},  # a schema cannot describe a stream
    }
    answer["x-events"] = {kind: reference(f"event-{kind}") for kind in schemas.event_schemas()}
    return {
        path: {
            "get": operation(
                path, "get", "Events of the run as they happen", answer, parameters=parameters
            )
        }
    }


def resources(configs: Sequence[Config], *, others: bool = False) -> dict[str, Any]:
    """Operations on the live settings of ``configs``. ``others``: runs of other algorithms are
    possible, too.
    """
    unknown: list[Schema] = [{"type": "object"}] if others else []
    return {
        f"{RUN}/{resource}": _resource(
            f"{RUN}/{resource}", resource, configs, unknown if "algorithm" in sections else []
        )
        for resource, sections in RESOURCES.items()
    }


def _resource(
    path: str, resource: str, configs: Sequence[Config], unknown: Sequence[Schema]
) -> dict[str, Any]:
    shown = _either([*(schemas.settings_read(config, resource) for config in configs), *unknown])
    taken = _either([*(schemas.settings_patch(config, resource) for config in configs), *unknown])
    answer = answered(
        "The settings in force",
        shown,
        headers={"ETag": ETAG, "Accept-Patch": {"schema": {"const": MERGE_PATCH}}},
    )
    condition = {
        "name": "If-Match",
        "in": "header",
        "description": "Change the settings only if this ETag, or one of several, is that of the "
        "settings in force; *: always",
        "schema": {"type": "string", "pattern": TAGS},
    }
    body = {"required": True, "content": {MERGE_PATCH: {"schema": taken}}}
    change = (
        "Change settings, all or none; null sets the default. A value that fits the schema can "
        "still conflict with other settings"
    )
    refusals = (409, 412, 415, 422)
    return {
        **reading(path, f"Live settings of {resource}", answer),
        "patch": operation(
            path, "patch", change, answer, *refusals, parameters=[condition], requestBody=body
        ),
    }


def _either(found: Sequence[Schema]) -> Schema:
    different = [schema for index, schema in enumerate(found) if schema not in found[:index]]
    return (
        different[0]
        if len(different) == 1
        else {"anyOf": different}
        if different
        else {"type": "object"}
    )
