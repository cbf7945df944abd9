"""JSON schemas (2020-12) of what the service answers and takes: of the models themselves, and of
what `tianflow.observability.run_document` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

from tianflow.config.describe import meanings
from tianflow.config.loading import LARGEST
from tianflow.config.model import Config, live_of
from tianflow.core import events
from tianflow.core.statistics import ControllerStatistics, Diagnosis
from tianflow.server.common.event_feed import LOST, kind_of
from tianflow.server.common.live_settings import RESOURCES, live_values

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": ["number", "null"]}
"""What JSON has no number for is null."""
ANY: Schema = {}
ALONE = (
    events.EnvironmentFailed,
    events.EvaluationFinished,
    events.HostExited,
    events.SettingsChanged,
)
"""Events that are told one by one."""


def reference(name: str) -> Schema:
    """To a named schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def struct(optional: Iterable[str] = (), **properties: Schema) -> Schema:
    """An object with these properties and no others, all there but the ``optional`` ones."""
    required = [name for name in properties if name not in set(optional)]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def listing(items: Schema) -> Schema:
    """An array."""
    return {"type": "array", "items": items}


def table(values: Schema) -> Schema:
    """An object of any keys."""
    return {"type": "object", "additionalProperties": values}


def nullable(schema: Schema) -> Schema:
    """Or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def settings_read(config: Config, resource: str) -> Schema:
    """The live settings of ``resource`` as they are shown."""
    return struct(**_live(config, resource, "serialization"))


def settings_patch(config: Config, resource: str) -> Schema:
    """A merge patch of them (RFC 7396): any of them, null for the default."""
    properties = {
        name: nullable(_patched(schema))
        for name, schema in _live(config, resource, "validation").items()
    }
    if (
        resource == "replay" and config.algorithm.window is None
    ):  # an algorithm without replay has no use for them
        texts = meanings(type(config.replay))
        properties = {
            name: {"enum": [value, None], "description": texts[name]}
            for name, value in live_values(config, resource).items()
        }
    return struct(properties, **properties)


def _patched(schema: Schema) -> Schema:
    """As a merge patch has it: null takes a key out of a table, and whole numbers have 64 bits."""
    found = {
        key: [_patched(item) for item in value] if key == "anyOf" else value
        for key, value in schema.items()
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
    """Made once: it takes milliseconds of the loop that the run's coordinator lives on."""
    return model.model_json_schema(mode=mode)


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Without references to the model's own definitions, which have no place in the document; they
    hold no cycles, being settings.
    """
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items()}
    return [_inlined(item, definitions) for item in schema] if isinstance(schema, list) else schema


def of_dataclass(cls: type, **more: Schema) -> Schema:
    """All fields, as `json_ready` leaves them: any number may be null."""
    schema = TypeAdapter(cls).json_schema(mode="serialization")
    properties = {name: _with_null(value) for name, value in schema["properties"].items()}
    return struct(**more, **properties) | {"description": schema.get("description", "")}


def _with_null(schema: Any) -> Any:
    if isinstance(schema, dict):
        if schema.get("type") == "number":
            return {**{key: value for key, value in schema.items() if key != "type"}, **NUMBER}
        found = {key: _with_null(value) for key, value in schema.items() if key != "default"}
        members = found.get("prefixItems")
        if members and all(
            member == members[0] for member in members
        ):  # many readers of such documents do not know prefixItems
            found["items"] = found.pop("prefixItems")[0]
        return found
    return [_with_null(item) for item in schema] if isinstance(schema, list) else schema


@cache
def event_schemas() -> dict[str, Schema]:
    """``data`` of each event, by kind."""
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
        | {"description": "Updates of a quarter of a second, the newest one's numbers"},
        kind_of(events.EpisodesFinished): episodes
        | {"description": "Episodes of a quarter of a second"},
        LOST: struct(["at"], at=NUMBER, count=nullable(COUNT), reason=TEXT)
        | {"description": "Events that are gone; null: nobody knows how many"},
        **{kind_of(cls): of_dataclass(cls, at=NUMBER) for cls in ALONE},
    }


def problem() -> Schema:
    """An RFC 9457 problem document."""
    known = {"type": TEXT, "title": TEXT, "status": {"type": "integer"}, "detail": TEXT}
    refused = struct(
        path=TEXT, value=ANY, message=TEXT, accepted=nullable(TEXT), nearest=nullable(TEXT)
    )
    more = {
        "errors": listing(refused)
        | {"description": "invalid-settings: each setting that was refused"},
        "reasons": listing(TEXT) | {"description": "not-ready: why training cannot proceed"},
        "id": TEXT | {"description": "internal-error: the log has more under it"},
    }
    return {"type": "object", "properties": known | more, "required": list(known)}


@cache
def named() -> dict[str, Schema]:
    """Schemas that the document refers to by name."""
    version = struct(lineage=COUNT, number=COUNT)
    component = {
        "name": TEXT,
        "role": TEXT,
        "host": TEXT,
        "state": TEXT,
        "shares": table(NUMBER),
        "generation": COUNT,
    }
    distribution = struct(count=COUNT, mean=NUMBER)
    more = {
        "seconds": table(NUMBER),
        "counters": table(NUMBER),
        "gauges": table(NUMBER),
        "distributions": table(distribution),
    }
    return {
        "Problem": problem(),
        "Runs": struct(runs=listing(struct(id=TEXT, state=TEXT, ready=TRUTH, href=TEXT))),
        "Run": _run(version, struct(**component)),
        "Component": struct(**component, **more),
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
            name=TEXT, version=listing(COUNT), env_steps=COUNT, bytes=COUNT, created=TEXT
        ),
        "HistoryRow": _history_row(),
        "Action": struct(id=TEXT, action=TEXT, state=TEXT),
        **{f"event-{kind}": schema for kind, schema in event_schemas().items()},
    }


def _history_row() -> Schema:
    """A line of ``history.jsonl``; see `tianflow.rundir.history.Row`. Those of older versions of
    tianflow lack some members.
    """
    numbers = ("t", "span_s", "time", "mean_return", "steps_per_s", "updates_per_s", "queue")
    staleness = {
        **dict.fromkeys(("count", "min", "mean", "p99", "max", "bound"), NUMBER),
        "counts": table(COUNT),
    }
    members: dict[str, Schema] = {
        **dict.fromkeys(numbers, NUMBER),
        **dict.fromkeys(
            ("env_steps", "updates", "episodes", "violations", "generation", "marks_left_out"),
            COUNT,
        ),
        "state": TEXT,
        "bottleneck": TEXT,
        "staleness": struct(staleness, **staleness),
        "credits": struct(limit=COUNT, in_use=COUNT),
        "shares": table(table(NUMBER)),
        "durations": table(table(NUMBER)),
        "dropped": table(COUNT),
        "replay": nullable(table(ANY)),
        "marks": listing(table(ANY)),
    }
    return struct(set(members) - {"t"}, **members)


def _run(version: Schema, component: Schema) -> Schema:
    speed = struct(**dict.fromkeys(("10", "60", "300"), NUMBER))
    counts = (
        "granted",
        "begun",
        "committed",
        "trained",
        "inserted",
        "open",
        "late_commits",
        "cuts",
    )
    steps = dict.fromkeys(
        ("env_steps", "env_frames", "episodes", "updates", "skipped_updates"), COUNT
    )
    return struct(
        **dict.fromkeys(("id", "state", "environment", "algorithm", "bottleneck"), TEXT),
        ready=TRUTH,
        reasons=listing(TEXT),
        elapsed_s=NUMBER,
        evaluating=TRUTH,
        diagnosis=reference("Diagnosis"),
        progress=struct(**steps, time_left_s=table(NUMBER)),
        throughput=struct(env_steps_per_s=speed, updates_per_s=speed),
        shares=table(table(NUMBER)),
        returns=struct(episodes=COUNT, mean=NUMBER, min=NUMBER, max=NUMBER),
        target=struct(**{"return": NUMBER, "reached_after_s": NUMBER}),
        evaluation=nullable(table(ANY)),
        versions=struct(learner=version, published=version, publish_lag=COUNT),
        staleness=struct(
            bound={"anyOf": [COUNT, {"const": "unbounded"}]},
            **dict.fromkeys(("min", "mean", "p99", "max"), NUMBER),
            violations=COUNT,
            counts=table(COUNT)
            | {
                "description": "Trained on since the process began, by staleness; from 16 on to "
                "three binary digits"
            },
        ),
        trajectories=struct(**dict.fromkeys(counts, COUNT), dropped=table(COUNT)),
        replay=nullable(table(ANY)),
        queue=struct(trajectories=COUNT, oldest_age_s=NUMBER),
        credits=struct(limit=COUNT, in_use=COUNT, ceiling=COUNT, target=COUNT),
        controllers=listing(reference("Controller")),
        settings=struct(generation=COUNT, changes=COUNT, refused=COUNT),
        actors=struct(wanted=COUNT, reporting=COUNT),
        components=listing(component),
        restarts=listing(struct(component=TEXT, reason=TEXT, count=COUNT)),
        checkpoint=struct(attempts=COUNT, failures=COUNT, last_success=NUMBER),
    )
