"""JSON schemas (2020-12) of requests and answers, made from settings models and from documents'
dataclasses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

from tianflow.config.describe import meanings
from tianflow.config.model import Config, live_of
from tianflow.config.portable import LARGEST
from tianflow.core import events
from tianflow.core.statistics import ControllerStatistics, Diagnosis
from tianflow.observability.run_document import ComponentDetails, NodeState, RunDocument
from tianflow.rundir.history import HistoryRow
from tianflow.rundir.summary import RunSummary
from tianflow.server.common.event_feed import LOST, kind_of
from tianflow.server.common.live_settings import RESOURCES, live_values

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": ["number", "null"]}
"""Null stands for numbers that JSON lacks (NaN, infinity)."""
ANY: Schema = {}
NAMED = {"Diagnosis": "Diagnosis", "ControllerStatistics": "Controller"}
"""Dataclasses inside others that have a schema of their own, and its name."""
ALONE = (
    events.EnvironmentFailed,
    events.EvaluationFinished,
    events.HostExited,
    events.SettingsChanged,
)
"""Events that the stream sends one by one."""


def reference(name: str) -> Schema:
    """Reference to a named schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def struct(optional: Iterable[str] = (), **properties: Schema) -> Schema:
    """Object with exactly these properties; the ``optional`` ones may be missing."""
    required = [name for name in properties if name not in set(optional)]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def listing(items: Schema) -> Schema:
    """Array of ``items``."""
    return {"type": "array", "items": items}


def table(values: Schema) -> Schema:
    """Object with any keys."""
    return {"type": "object", "additionalProperties": values}


def nullable(schema: Schema) -> Schema:
    """``schema`` or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def settings_read(config: Config, resource: str) -> Schema:
    """Live settings of ``resource`` as an answer."""
    return struct(**_live(config, resource, "serialization"))


def settings_patch(config: Config, resource: str) -> Schema:
    """Merge patch of live settings (RFC 7396): any of them; null for the default."""
    properties = {
        name: nullable(_patched(schema))
        for name, schema in _live(config, resource, "validation").items()
    }
    if resource == "replay" and config.algorithm.window is None:
        # An algorithm without replay does not use them: the current values only.
        texts = meanings(type(config.replay))
        properties = {
            name: {"enum": [value, None], "description": texts[name]}
            for name, value in live_values(config, resource).items()
        }
    return struct(properties, **properties)


def _patched(schema: Schema) -> Schema:
    """``schema`` in a merge patch: null removes a key of a table; whole numbers have 64 bits."""
    found = {
        key: [_patched(item) for item in value] if key in {"anyOf", "oneOf"} else value
        for key, value in schema.items()
        if key != "required"  # a patch may change one entry of a table
    }
    if isinstance(properties := schema.get("properties"), dict):
        found["properties"] = {
            name: nullable(_patched(inner)) for name, inner in properties.items()
        }
    if isinstance(values := schema.get("additionalProperties"), dict):
        found["additionalProperties"] = nullable(values)
    return {"maximum": LARGEST, **found} if schema.get("type") == "integer" else found


def _live(config: Config, resource: str, mode: Any) -> dict[str, Schema]:
    live = live_of(config)
    found = {}
    for section in RESOURCES[resource]:
        model: type[BaseModel] = type(getattr(config, section))
        whole = _whole(model, mode)
        definitions = whole.get("$defs", {})
        texts = meanings(model)
        for key in live[section]:
            text = {"description": texts[key]} if key in texts else {}
            found[key] = _inlined(whole["properties"][key], definitions) | text
    return found


@cache
def _whole(model: type[BaseModel], mode: Any) -> dict[str, Any]:
    """Cached: it takes milliseconds, and the coordinator shares the event loop."""
    return model.model_json_schema(mode=mode)


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """``schema`` with its references replaced by ``definitions``, which hold no cycles."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return (
                reference(NAMED[name])
                if name in NAMED
                else _inlined(definitions[name], definitions)
            )
        return {key: _inlined(value, definitions) for key, value in schema.items()}
    return [_inlined(item, definitions) for item in schema] if isinstance(schema, list) else schema


def of_dataclass(cls: type, *, required: Collection[str] | None = None, **more: Schema) -> Schema:
    """The schema of the dataclass ``cls`` as `json_ready` writes it, with ``more`` properties.

    Any number may be null. ``required``: names that cannot be missing, as others can in files of
    older versions; None: all.
    """
    schema = TypeAdapter(cls).json_schema(mode="serialization")
    definitions = schema.pop("$defs", {})
    found: Schema = _as_written(_inlined(schema, definitions), required)
    found["properties"] = {**more, **found["properties"]}
    found["required"] = [*more, *found["required"]]
    return found


def _as_written(schema: Any, required: Collection[str] | None) -> Any:
    """``schema`` for a program that reads the JSON: closed objects, numbers that may be null."""
    if isinstance(schema, list):
        return [_as_written(item, required) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: _as_written(value, required)
        for key, value in schema.items()
        if key not in {"default", "title", "properties"}
    }
    if found.get("type") == "number":
        found |= NUMBER
    if found.get("anyOf") == [NUMBER, {"type": "null"}]:
        found |= NUMBER
        del found["anyOf"]
    if "properties" in schema:
        found["properties"] = {
            name.rstrip("_"): _as_written(value, required)
            for name, value in schema["properties"].items()
        }
        found["required"] = [
            name for name in found["properties"] if required is None or name in required
        ]
        found["additionalProperties"] = False
    members = found.get("prefixItems")
    if members and all(member == members[0] for member in members):
        found["items"] = found.pop("prefixItems")[0]  # many readers do not know prefixItems
    return found


@cache
def event_schemas() -> dict[str, Schema]:
    """Schema of the ``data`` of each event, by kind."""
    updates = struct(
        at=NUMBER,
        count=COUNT,
        version=COUNT,
        seconds=NUMBER,
        samples=COUNT,
        statistics=table(NUMBER),
    )
    episodes = struct(
        at=NUMBER,
        count=COUNT,
        mean_return=NUMBER,
        min_return=NUMBER,
        max_return=NUMBER,
        mean_length=NUMBER,
    )
    return {
        kind_of(events.UpdateFinished): updates
        | {"description": "Updates of a quarter of a second, with the numbers of the newest"},
        kind_of(events.EpisodesFinished): episodes
        | {"description": "Episodes of a quarter of a second"},
        LOST: struct(["at"], at=NUMBER, count=nullable(COUNT), reason=TEXT)
        | {"description": "Events that were lost; count is null if the number is unknown"},
        **{kind_of(cls): of_dataclass(cls, at=NUMBER) for cls in ALONE},
    }


def problem() -> Schema:
    """Problem document (RFC 9457)."""
    known = {"type": TEXT, "title": TEXT, "status": {"type": "integer"}, "detail": TEXT}
    refused = struct(
        path=TEXT, value=ANY, message=TEXT, accepted=nullable(TEXT), nearest=nullable(TEXT)
    )
    more = {
        "errors": listing(refused)
        | {"description": "Of invalid-settings: each setting that was refused"},
        "reasons": listing(TEXT) | {"description": "Of not-ready: why training cannot proceed"},
        "id": TEXT | {"description": "Of internal-error: id of the error in the log"},
    }
    return {"type": "object", "properties": known | more, "required": list(known)}


@cache
def named() -> dict[str, Schema]:
    """Schemas that the document refers to by name."""
    return {
        "Problem": problem(),
        "Runs": struct(runs=listing(struct(id=TEXT, state=TEXT, ready=TRUTH, href=TEXT))),
        "Run": of_dataclass(RunDocument),
        "Component": of_dataclass(ComponentDetails),
        "Node": of_dataclass(NodeState),
        "Diagnosis": of_dataclass(Diagnosis),
        "Controller": of_dataclass(ControllerStatistics),
        "AuditEntry": struct(
            ["old", "new"],
            time=TEXT | {"format": "date-time"},
            source=TEXT,
            action=TEXT,
            old=ANY,
            new=ANY,
        ),
        "Checkpoint": struct(
            name=TEXT,
            version=listing(COUNT),
            env_steps=COUNT,
            bytes=COUNT,
            created=TEXT,
            best=TRUTH | {"description": "Of the version with the best evaluation"},
            regular=TRUTH | {"description": "False: written for its evaluation alone"},
        ),
        "HistoryRow": of_dataclass(HistoryRow, required=("t",)),
        "Summary": of_dataclass(RunSummary, required=()) | {"additionalProperties": True},
        "Action": struct(id=TEXT, action=TEXT, state=TEXT),
        **{f"event-{kind}": schema for kind, schema in event_schemas().items()},
    }
