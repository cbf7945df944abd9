"""Files, overrides and live changes become a `Config`, or a `ConfigError` that names every problem
at once.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from tianflow import plugins
from tianflow.config import rules as config_rules
from tianflow.config.model import (
    BUILT_IN_ALGORITHMS,
    AlgorithmSettings,
    Config,
    algorithm_settings,
    live_of,
)
from tianflow.config.problems import innermost, problems_of, unknown_key
from tianflow.errors import ConfigError, Problem
from tianflow.logs import logger

CONFIG_FILE = "config.toml"
"""In a run's directory: the settings in force, live changes included."""

LARGEST = 2**63 - 1
"""The largest whole number that reaches a run's processes."""

_log = logger("config")

Overrides = Sequence[str] | Mapping[str, object]
Changes = Mapping[str, object]
Table = dict[str, Any]


class _AnyAlgorithm(AlgorithmSettings, extra="allow"):
    """Stands in for the settings of an algorithm that is not known, so that the other sections are
    still checked.
    """

    name: str = ""
    """Its absence is reported with the names there are."""


def shipped() -> dict[str, Path]:
    """Configs that come with tianflow, by name: inside an installed wheel, or beside the package in
    a checkout.
    """
    package = Path(__file__).parents[1]
    return {
        path.stem: path
        for folder in (package.parent / "configs", package / "configs")
        for path in sorted(folder.glob("*.toml"))
    }


def load_config(source: str | Path | Mapping[str, object], overrides: Overrides = ()) -> Config:
    """Read a config and change it by ``overrides``.

    Args:
        source: a TOML file, the name of a shipped config, or tables as Python mappings.
        overrides: ``"section.key=value"`` with TOML values (what is no TOML is taken as a bare
            string, ``null`` resets to the default), or a mapping from dotted paths to values.

    Raises:
        ConfigError: with every problem found.
    """
    tables = _merged({}, source) if isinstance(source, Mapping) else read_tables(source)
    problems: list[Problem] = []
    for path, value in (
        overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    ).items():
        _override(tables, path, value, problems)
    plain = _plain(tables, "", problems)
    if problems:
        raise ConfigError(problems)
    return _checked(plain)


def load_shipped(name: str, overrides: Overrides = ()) -> Config:
    """As `load_config`, for a name only: what somebody else asks for must not read files here."""
    known = shipped()
    if name not in known:
        raise ConfigError([_no_such(name, known)])
    return load_config(known[name], overrides)


def with_changes(config: Config, changes: Changes) -> Config:
    """``config`` with live settings changed: ``{section: {key: value}}`` as a merge patch (None
    resets to the default).

    Whole or not at all. Raises:
        ConfigError: a setting is unknown, needs a new run, or makes the combination impossible.
            Nothing has changed.
    """
    problems: list[Problem] = []
    for section, values in changes.items():
        if section not in Config.model_fields:
            problems.append(unknown_key(Config, (section,), None, live=live_of(config)))
        elif not isinstance(values, Mapping):
            problems.append(Problem(section, values, "is a section", "a table of settings"))
        else:
            problems += [
                problem
                for key, value in values.items()
                if (problem := _not_live(config, section, key, value)) is not None
            ]
    plain = _plain(changes, "", problems)
    if problems:
        raise ConfigError(problems)
    return _checked(_merged(config.model_dump(mode="json"), plain))


def live_settings(config: Config) -> str:
    """All settings that may change while a run with ``config`` goes on, as a sentence part."""
    return ", ".join(
        f"{section}.{key}" for section, keys in live_of(config).items() for key in keys
    )


def write_config(directory: Path, config: Config) -> None:
    """Keep ``config`` as ``config.toml`` in a run's directory, whole or not at all. OSError when
    the disk refuses.
    """
    write_toml(directory / CONFIG_FILE, config)


def write_toml(path: Path, config: Config) -> None:
    """Write ``config`` as the file ``path``, whole or not at all. OSError, which names the file,
    when the disk refuses.
    """
    written = path.with_name(f".{path.name}")
    try:
        written.write_text(to_toml(config), encoding="utf-8")
        written.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise OSError(
            error.errno, error.strerror, str(path)
        ) from error  # a write that is refused names none


def settings_in_force(run: str, runs_dir: Path) -> Path | None:
    """Where a run, given by name or directory, keeps what was in force last; None if ``run`` is
    something else, a checkpoint say, or if the file is spoiled: its checkpoints tell what was in
    force then.
    """
    kept = (
        directory / CONFIG_FILE
        for directory in (Path(run), runs_dir / run)
        if (directory / "checkpoints").is_dir()
    )
    found = next((path for path in kept if path.is_file()), None)
    try:
        if found is None or read_tables(found):
            return found
        problem = "it is empty"
    except ConfigError as error:
        problem = str(error)
    _log.warning(
        "the settings in force last cannot be read; those of the checkpoint are taken",
        problem=problem,
    )
    return None


def to_toml(config: Config, *, only_changed: bool = False) -> str:
    """The config as TOML that `load_config` reads back to an equal one. TOML has no null: what is
    None is a comment.

    ``only_changed``: without what equals its default.
    """
    parts = []
    for section, values in config.model_dump(mode="json", exclude_defaults=only_changed).items():
        named = {"name": config.algorithm.name} if section == "algorithm" else {}
        lines = [
            f"# {key} is not set" if value is None else f"{_key(key)} = {toml_value(value)}"
            for key, value in (named | values).items()
        ]
        parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def read_tables(source: str | Path) -> Table:
    """The tables of a TOML file or shipped config, unchecked. Raises ConfigError: there is none, or
    it is no TOML.
    """
    path = Path(source)
    if not path.is_file():
        known = shipped()
        if str(source) not in known:
            raise ConfigError([_no_such(str(source), known)])
        path = known[str(source)]
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([Problem(str(source), None, f"is not TOML: {error}")]) from error
    except OSError as error:
        raise ConfigError(
            [Problem(str(source), None, f"cannot be read: {error.strerror}")]
        ) from error


def _no_such(source: str, known: Mapping[str, Path]) -> Problem:
    accepted = "a TOML file, or one of " + ", ".join(sorted(known))
    return Problem(
        source, None, "no such config", accepted, plugins.nearest(Path(source).stem, tuple(known))
    )


def parse_overrides(texts: Sequence[str]) -> dict[str, object]:
    """``["section.key=value", ...]`` as {dotted path: value}; the later of two wins.

    Raises:
        ConfigError: naming every text that is none.
    """
    parts = [(text, *text.partition("=")) for text in texts]
    if problems := [
        Problem(text, None, "is no override", "section.key=value")
        for text, _, equals, _ in parts
        if not equals
    ]:
        raise ConfigError(problems)
    return {path.strip(): parse_value(value.strip()) for _, path, _, value in parts}


def nested(overrides: Mapping[str, object]) -> dict[str, Table]:
    """{dotted path: value} as {section: {key: value}}, a merge patch in which None stands for the
    default.

    Raises:
        ConfigError: naming every path that has no section, or one that leads through a value.
    """
    if problems := [
        Problem(path, value, "is no path of a setting", "section.key")
        for path, value in overrides.items()
        if "." not in path
    ]:
        raise ConfigError(problems)
    sections: dict[str, Table] = {}
    for path, value in overrides.items():
        section, *parents, key = path.split(".")
        table = sections.setdefault(section, {})
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError([Problem(path, value, f"{parent!r} is a value, not a table")])
        table[key] = value
    return sections


def parse_value(text: str) -> object:
    """A TOML value, ``null``, or else ``text`` itself."""
    if text == "null":
        return None
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _override(tables: Table, path: str, value: object, problems: list[Problem]) -> None:
    *parents, key = path.split(".")
    if not all((*parents, key)):
        problems.append(Problem(path, value, "is no path of a setting", "section.key"))
        return
    table = tables
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            problems.append(Problem(path, value, f"{parent!r} is a value, not a table"))
            return
        table = inner
    if isinstance(value, Mapping):
        table[key] = _merged(table.get(key), value)
    elif value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _merged(into: object, patch: Mapping[str, object]) -> Table:
    """RFC 7396: mappings are merged, None removes, everything else replaces."""
    result: Table = dict(into) if isinstance(into, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value) if isinstance(value, Mapping) else value
    return result


def _plain(value: object, path: str, problems: list[Problem]) -> Any:
    """Lists, tables, strings and numbers only: what another process, a file and an HTTP body can
    hold.
    """
    if isinstance(value, Mapping):
        return {
            str(key): _plain(inner, f"{path}.{key}".strip("."), problems)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(inner, path, problems) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    problems.append(_no_object(path, value))
    return None


def _no_object(path: str, value: object) -> Problem:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    if module in {None, "__main__"} or "<" in name:
        message = "exists in this process only, so no other can import it"
        return Problem(
            path, value, message, "put it in a module of its own and write 'module:attribute'"
        )
    return Problem(
        path,
        value,
        "a Python object cannot be given to other processes",
        "its name as a string",
        f"{module}:{name}",
    )


@cache
def _model(algorithm: type[AlgorithmSettings]) -> type[Config]:
    """`Config` with its algorithm section read by ``algorithm``, so that one validation finds every
    problem.
    """
    return create_model("Config", __base__=Config, algorithm=(algorithm, ...))


def _checked(tables: Table) -> Config:
    """The config that ``tables`` describe.

    Strict JSON rules: ``"4"`` and ``true`` are no numbers, whole numbers do for floats, lists for
    tuples.
    """
    _refuse_too_large(tables)
    problems: list[Problem] = []
    section = tables.get("algorithm")
    name = section.get("name") if isinstance(section, dict) else None
    settings: type[AlgorithmSettings] = _AnyAlgorithm
    if isinstance(name, str):
        try:
            settings = algorithm_settings(name)
        except ConfigError as error:
            problems += error.problems
    elif name is None and (section is None or isinstance(section, dict)):
        problems.append(
            Problem(
                "algorithm.name",
                None,
                "is required",
                "one of " + ", ".join(sorted(BUILT_IN_ALGORITHMS)),
            )
        )
    tables = _fitted(tables, settings)
    try:
        parsed = _model(settings).model_validate_json(json.dumps(tables), strict=True)
    except ValidationError as error:
        raise ConfigError(innermost([*problems_of(error, _model(settings)), *problems])) from None
    if problems:
        raise ConfigError(problems)
    config = Config.model_validate(
        {section: getattr(parsed, section) for section in Config.model_fields}
    )
    _refuse_too_large(
        config.model_dump(mode="json")
    )  # what was written as 1e30 or "9999999TiB" is a whole number only now
    if problems := config_rules.check(config):
        raise ConfigError(problems)
    return config


def _refuse_too_large(tables: Table) -> None:
    # Not the arguments of environments: they are the user's own, never change live, and need not
    # leave the process if it is the only one.
    if too_large := list(
        _too_large("", {name: table for name, table in tables.items() if name != "env"})
    ):
        raise ConfigError(too_large)


def _too_large(path: str, value: object) -> Iterator[Problem]:
    """Whole numbers that no message to another process holds: in force here, they would break every
    one that they are sent to.
    """
    if isinstance(value, int) and abs(value) > LARGEST:
        yield Problem(
            path,
            f"a number of {value.bit_length()} bits",
            "is larger than any number that can be kept",
            f"at most {LARGEST}",
        )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _too_large(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _too_large(f"{path}.{index}", item)


def _fitted(tables: Table, settings: type[AlgorithmSettings]) -> Table:
    """Lower the two defaults that would not fit short rollouts, and lift those that would empty
    replay; what was written down stays.
    """
    fitted = {
        key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()
    }
    try:
        steps = int(fitted.get("actors", {}).get("rollout_steps", 32))
        samples = (
            steps
            * int(fitted["env"].get("num_envs", 8))
            * int(fitted["algorithm"].get("batch_trajectories", 1))
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return fitted  # wrong in a way that validation will name
    balance, default = fitted.setdefault("balance", {}), settings.model_fields.get("minibatch_size")
    if isinstance(balance, dict):
        balance.setdefault("min_fragment_steps", max(1, min(8, steps)))
        if settings.window is not AlgorithmSettings.window:  # what is replayed is old on purpose
            balance.setdefault("max_staleness", "unbounded")
            balance.setdefault("controller", "sample_ratio")
    if default is not None and "minibatch_size" not in fitted["algorithm"]:
        fitted["algorithm"]["minibatch_size"] = max(1, min(default.default, samples))
    return fitted


def _not_live(config: Config, section: str, key: str, value: object) -> Problem | None:
    live = live_of(config)
    if key in live.get(section, ()):
        return None
    if section in live and key not in type(getattr(config, section)).model_fields:
        return unknown_key(Config, (section, key), value, live=live)
    return Problem(
        f"{section}.{key}",
        value,
        "cannot change while the run goes on; it needs a new run",
        f"live settings: {live_settings(config)}",
    )


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: object) -> str:
    """One value as TOML writes it; tables are written inline, None inside them is left out."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None
        )
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
