"""``tianflow config list`` and ``explain``: which configs there are, and what each setting means,
from the model that checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tianflow.cli.common import exit_codes

_RANGES = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
}
_KINDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "object": "table",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted path, what it takes, its default as TOML ("" where it is required),
    whether it is live, and what it means.
    """

    path: str
    takes: str
    default: str
    live: bool
    text: str

    def lines(self) -> str:
        """For a person."""
        facts = [
            self.takes,
            f"default {self.default}" if self.default else "required",
            *(["live"] if self.live else []),
        ]
        return "\n    ".join(part for part in (self.path, self.text, "; ".join(facts)) if part)


def list_configs() -> None:
    """Print the configs that come with tianflow: their names, and what they train."""
    from tianflow.config.loading import shipped

    found = shipped()
    width = max(map(len, found))
    for name, path in found.items():
        said = (
            path.read_text(encoding="utf-8")
            .partition("\n\n")[0]
            .replace("\n#", "")
            .removeprefix("# ")
        )
        typer.echo(f"{name:{width}}  {said.partition('. ')[0].rstrip('.')}")


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A section, an algorithm, or a setting; without it all sections."
        ),
    ] = None,
) -> None:
    """Say what settings mean, what they take, and which can be changed while a run goes on
    (live).
    """
    with exit_codes():
        typer.echo(
            "\n".join(_sections() if name is None else [setting.lines() for setting in find(name)])
        )


def _sections() -> Iterator[str]:
    from tianflow.config.model import BUILT_IN_ALGORITHMS, Config

    for section, field in Config.model_fields.items():
        if section == "algorithm":
            yield (
                f"{section:11} Which algorithm learns, and how; settings by name: "
                f"{', '.join(BUILT_IN_ALGORITHMS)}."
            )
        else:
            meaning = (field.annotation.__doc__ if field.annotation else "") or ""
            yield f"{section:11} {meaning}".rstrip()


def find(name: str) -> list[Setting]:
    """Settings of the section, algorithm or setting called ``name``. Of a setting's name alone,
    those of all sections that have one.

    Raises:
        ConfigError: there is none; the nearest name is in it.
    """
    from tianflow.config.model import (
        BUILT_IN_ALGORITHMS,
        LIVE,
        AlgorithmSettings,
        Config,
        algorithm_settings,
    )

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
    if ":" in name:
        model = algorithm_settings(name)
        return list(settings_of(model, "algorithm", model.live))
    if name in parts:
        return parts[name]
    return _named(name, parts)


def _named(name: str, parts: Mapping[str, list[Setting]]) -> list[Setting]:
    from tianflow import plugins
    from tianflow.errors import ConfigError, Problem

    found: dict[str, Setting] = {}
    known: dict[str, None] = dict.fromkeys(parts)
    for setting in (setting for part in parts.values() for setting in part):
        last = setting.path.rpartition(".")[2]
        known |= {setting.path: None, last: None}
        if name in {setting.path, last} or setting.path.startswith(f"{name}."):
            found.setdefault(setting.path, setting)
    if not found:
        # among some hundred names there is one that is half alike for any word
        nearest = plugins.nearest(name, tuple(known), cutoff=0.6)
        accepted = (
            f"one of {', '.join(parts)}, or a setting of one of them, such as run.seed or seed"
        )
        raise ConfigError(
            [Problem(name, None, "is no section, algorithm or setting", accepted, nearest)]
        )
    return list(found.values())


def settings_of(model: Any, section: str, live: tuple[str, ...]) -> Iterator[Setting]:
    """Every setting of the model of ``section``, those of tables inside it with their own paths."""
    from tianflow.config.loading import toml_value
    from tianflow.config.on_policy import Section
    from tianflow.server.common.docstrings import of_fields

    texts, properties = of_fields(model), model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        path = f"{section}.{name}"
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
        yield Setting(path, takes(properties[name]), default, name in live, texts.get(name, ""))


def takes(schema: Mapping[str, Any]) -> str:
    """What a setting of this JSON schema takes, in words."""
    if "anyOf" in schema:
        return ", or ".join(takes(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return ", ".join(str(choice) for choice in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {takes(schema['items'])}" if "items" in schema else "list"
    bounds = [f"{word} {schema[key]:g}" for key, word in _RANGES.items() if key in schema]
    return " ".join([_KINDS.get(schema.get("type", ""), "anything"), *bounds])
