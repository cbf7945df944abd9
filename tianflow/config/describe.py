"""Descriptions of settings, from the models that check them: path, accepted values, default and
meaning.

The meaning of a setting is the docstring below its field, which pydantic stores as the field's
description (``use_attribute_docstrings``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tianflow import plugins
from tianflow.config.loading import toml_value
from tianflow.config.model import (
    BUILT_IN_ALGORITHMS,
    LIVE,
    AlgorithmSettings,
    Config,
    algorithm_names,
    algorithm_settings,
)
from tianflow.config.section import Section
from tianflow.errors import ConfigError, Problem

_BOUNDS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
}
_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "object": "table",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting.

    Attributes:
        path: such as ``balance.max_staleness``.
        accepted: values that it accepts, in words.
        default: as TOML; "" for a required setting.
        live: True if it can change while the run trains.
        meaning: its docstring.
    """

    path: str
    accepted: str
    default: str
    live: bool
    meaning: str


def find(name: str) -> list[Setting]:
    """The settings of a section or an algorithm, or the settings called ``name`` in any section.

    Raises:
        ConfigError: there are none; the message holds the nearest name.
    """
    parts = {
        section: list(
            settings_of(
                AlgorithmSettings if section == "algorithm" else field.annotation,
                section,
                LIVE.get(section, ()),
            )
        )
        for section, field in Config.model_fields.items()
    }
    parts |= {
        algorithm: list(settings_of(model, "algorithm", model.live))
        for algorithm, model in BUILT_IN_ALGORITHMS.items()
    }
    if name in parts:
        return parts[name]
    if ":" in name or name in algorithm_names():
        model = algorithm_settings(name)
        return list(settings_of(model, "algorithm", model.live))
    return _called(name, parts)


def _called(name: str, parts: Mapping[str, list[Setting]]) -> list[Setting]:
    found: dict[str, Setting] = {}
    known_parts = dict.fromkeys((*parts, *algorithm_names()))
    known = dict(known_parts)
    for setting in (setting for part in parts.values() for setting in part):
        last = setting.path.rpartition(".")[2]
        known |= {setting.path: None, last: None}
        if name in {setting.path, last} or setting.path.startswith(f"{name}."):
            found.setdefault(setting.path, setting)
    if not found:
        # Among some hundred names, one resembles any word by half.
        nearest = plugins.nearest(name, tuple(known), cutoff=0.6)
        accepted = (
            f"one of {', '.join(known_parts)}, or a setting of one of them, such as run.seed or "
            "seed"
        )
        raise ConfigError(
            [Problem(name, None, "is not a section, an algorithm or a setting", accepted, nearest)]
        )
    return list(found.values())


def settings_of(model: Any, section: str, live: tuple[str, ...]) -> Iterator[Setting]:
    """Every setting of the model of ``section``; those of tables in it have longer paths."""
    meaning, properties = meanings(model), model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        path = f"{section}.{name}"
        if field.exclude:  # only the base class has it
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from settings_of(field.annotation, path, ())
            continue
        default = (
            ""
            if field.is_required()
            else "none"
            if field.default is None
            else toml_value(field.default)
        )
        yield Setting(
            path, accepted(properties[name]), default, name in live, meaning.get(name, "")
        )


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each field on one line, by name. A field that only changes the default of a
    base class has the docstring from there; a field without any is absent.
    """
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel):
            found |= {
                name: field.description.replace("\n", " ")
                for name, field in cls.model_fields.items()
                if field.description
            }
    return found


def accepted(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema accepts, in words."""
    if alternatives := schema.get("anyOf", schema.get("oneOf")):
        return ", or ".join(accepted(part) for part in alternatives if part.get("type") != "null")
    if "$ref" in schema:
        return f"table of a {schema['$ref'].rpartition('/')[2].lower()}"
    if "const" in schema or "enum" in schema:
        return ", ".join(str(choice) for choice in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {accepted(schema['items'])}" if "items" in schema else "list"
    bounds = [f"{word} {schema[key]:g}" for key, word in _BOUNDS.items() if key in schema]
    return " ".join([_TYPES.get(schema.get("type", ""), "anything"), *bounds])
