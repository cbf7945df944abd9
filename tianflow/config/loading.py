"""Functions that make a `Config` of files, overrides and live changes, and that write it as TOML.

A `ConfigError` names all problems at once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from tianflow import plugins
from tianflow.config import rules as config_rules
from tianflow.config.model import (
    ON_ONE_MACHINE,
    AlgorithmSettings,
    Config,
    algorithm_names,
    algorithm_settings,
    live_of,
)
from tianflow.config.portable import TOO_LARGE, unportable
from tianflow.config.problems import innermost, path_with, problems_of, unknown_key
from tianflow.config.schedules import OBJECT, SCHEDULED
from tianflow.core.devices import cores, on_gpu
from tianflow.core.files import open_regular
from tianflow.errors import ConfigError, Problem
from tianflow.logs import logger

CONFIG_FILE = "config.toml"
"""File in a run's directory with the settings in force, including live changes."""

REVISION = "# revision "
"""Beginning of the first line of `CONFIG_FILE`. A resume compares it with that of a checkpoint."""

DURATIONS = frozenset({"slurm.time_limit"})
"""Settings whose text, such as ``12:00:00``, TOML reads as a time of day."""

_log = logger("config")

Overrides = Sequence[str] | Mapping[str, object]
Changes = Mapping[str, object]
Table = dict[str, Any]


class _AnyAlgorithm(AlgorithmSettings, extra="allow"):
    """Placeholder for the settings of an unknown algorithm; other sections are still checked."""

    name: str = ""
    """The missing name is reported with the available names."""


def shipped() -> dict[str, Path]:
    """Shipped configs by name: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    return {
        path.stem: path
        for folder in (package.parent / "configs", package / "configs")
        for path in sorted(folder.glob("*.toml"))
    }


def summary_of(text: str) -> str:
    """First sentence of the comment on top of a config file; "" without one."""
    comment = text.partition("\n\n")[0].replace("\n#", "").removeprefix("# ")
    return comment.partition(". ")[0].rstrip(".") if text.startswith("#") else ""


def load_config(source: str | Path | Mapping[str, object], overrides: Overrides = ()) -> Config:
    """Read a config and apply ``overrides``.

    Args:
        source: a TOML file, the name of a shipped config, or tables as Python mappings.
        overrides: a mapping from dotted paths to values, or texts ``"section.key=value"``. Values
            are TOML; other text is a bare string, and ``null`` resets to the default.

    Raises:
        ConfigError: names every problem.
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
    """`load_config` for shipped names only, because remote clients must not read local files."""
    known = shipped()
    if name not in known:
        raise ConfigError([_unknown_config(name, known)])
    return load_config(known[name], overrides)


def with_changes(config: Config, changes: Changes) -> Config:
    """``config`` with live changes ``{section: {key: value}}``, a merge patch.

    None resets a setting to its default. All changes are applied, or none.

    Raises:
        ConfigError: a setting is unknown, needs a new run, or makes the combination impossible.
    """
    problems: list[Problem] = []
    for section, values in changes.items():
        if section not in Config.model_fields:
            problems.append(unknown_key(Config, (section,), None, live=live_of(config)))
        elif not isinstance(values, Mapping):
            problems.append(Problem(section, values, "is not a table", "a table of settings"))
        else:
            problems += [
                problem
                for key, value in values.items()
                if (problem := _not_live(config, section, key, value)) is not None
            ]
    if "env" in changes and config.run.deterministic:
        message = "would take effect at a moment that a repetition of the run does not share"
        accepted = "a run with run.deterministic = false"
        problems.append(Problem("env.set", None, message, accepted))
    plain = _plain(changes, "", problems)
    if problems:
        raise ConfigError(problems)
    tables = config.model_dump(mode="json")
    for path in SCHEDULED:
        section, _, key = path.partition(".")
        if _is_whole_schedule(path, plain.get(section, {}).get(key)):
            tables[section][key] = None  # entries of another schedule have no meaning for it
    return _checked(_merged(tables, plain))


def live_settings(config: Config) -> str:
    """All live settings of ``config``, as part of a sentence."""
    return ", ".join(
        f"{section}.{key}" for section, keys in live_of(config).items() for key in keys
    )


def write_config(
    directory: Path,
    config: Config,
    *,
    revision: int = 0,
    before_it_counts: Callable[[], None] = lambda: None,
) -> None:
    """Write ``config`` as ``config.toml`` in a run's directory, atomically.

    Args:
        directory: of the run.
        config: settings in force.
        revision: number of changes of the settings since the run began (`read_revision`).
        before_it_counts: called when the file is whole and has no name yet. If it raises, the old
            file stays.

    Raises:
        OSError: the file cannot be written.
    """
    write_toml(
        directory / CONFIG_FILE,
        config,
        heading=f"{REVISION}{revision}\n\n" if revision else "",
        before_it_counts=before_it_counts,
    )


def read_revision(path: Path) -> int:
    """The revision of a file that `write_config` wrote; 0 without one. A file that was edited since
    still has its revision.
    """
    try:
        with open_regular(path) as file:
            found = re.fullmatch(rf"{REVISION}(\d{{1,18}})\r?\n?".encode(), file.readline(64))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def write_toml(
    path: Path,
    config: Config,
    *,
    heading: str = "",
    before_it_counts: Callable[[], None] = lambda: None,
) -> None:
    """Write ``config`` to the file ``path``, atomically. Only its owner can read it, because
    arguments of environments and sinks may be secret.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    written = path.with_name(f".{path.name}")
    try:
        written.unlink(missing_ok=True)
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(heading + to_toml(config))
        before_it_counts()
        written.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise OSError(
            error.errno, error.strerror, str(path)
        ) from error  # a failed write does not name its file


def settings_in_force(run: str, runs_dir: Path) -> Path | None:
    """File with the last settings in force of a run, given by name or directory.

    None if ``run`` is something else, such as a checkpoint, or if the file is damaged. A checkpoint
    contains the settings in force at its time.
    """
    candidates = (
        directory / CONFIG_FILE
        for directory in (Path(run), runs_dir / run)
        if (directory / "checkpoints").is_dir()
    )
    found = next((path for path in candidates if path.is_file()), None)
    try:
        if found is None or read_tables(found):
            return found
        problem = "the file is empty"
    except ConfigError as error:
        problem = str(error)
    _log.warning(
        "the last settings in force cannot be read; those of the checkpoint are used",
        problem=problem,
    )
    return None


def to_toml(config: Config, *, only_changed: bool = False) -> str:
    """``config`` as TOML that `load_config` reads back as an equal config.

    TOML has no null, so a setting without a value becomes a comment.

    Args:
        config: settings.
        only_changed: omit settings that equal their default.
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
    """The unchecked tables of a TOML file or shipped config.

    Raises:
        ConfigError: the file does not exist or is not TOML.
    """
    path = Path(source)
    if not path.is_file():
        known = shipped()
        if str(source) not in known:
            raise ConfigError([_unknown_config(str(source), known)])
        path = known[str(source)]
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([Problem(str(source), None, f"is not TOML: {error}")]) from error
    except OSError as error:
        raise ConfigError(
            [Problem(str(source), None, f"cannot be read: {error.strerror}")]
        ) from error


def _unknown_config(source: str, known: Mapping[str, Path]) -> Problem:
    if source in algorithm_names() or OBJECT.fullmatch(source):
        message = "is an algorithm, and needs an environment"
        if ":" in source:
            message = "is not a config, and as an algorithm it needs an environment"
        return Problem(source, None, message, f'{source} --env ID; in Python env="ID"')
    accepted = "a TOML file, or one of " + ", ".join(sorted(known))
    return Problem(
        source, None, "is not a config", accepted, plugins.nearest(Path(source).stem, tuple(known))
    )


def parse_overrides(texts: Sequence[str]) -> dict[str, object]:
    """``["section.key=value", ...]`` as {dotted path: value}; the last value of a path wins.

    Raises:
        ConfigError: names every text of another form.
    """
    parts = [(text, *text.partition("=")) for text in texts]
    if problems := [
        Problem(text, None, "is not a valid override", "section.key=value")
        for text, _, equals, _ in parts
        if not equals
    ]:
        raise ConfigError(problems)
    return {path.strip(): parse_value(value.strip()) for _, path, _, value in parts}


def nested(overrides: Mapping[str, object]) -> dict[str, Table]:
    """{dotted path: value} as {section: {key: value}}, a merge patch in which None means the
    default.

    Raises:
        ConfigError: names every path without a section, or through a value.
    """
    if problems := [
        Problem(path, value, "is not the path of a setting", "section.key", path_with(Config, path))
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
    """``text`` as a TOML value, None for ``null``, else ``text`` itself."""
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
        problems.append(Problem(path, value, "is not the path of a setting", "section.key"))
        return
    table = tables
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            problems.append(Problem(path, value, f"{parent!r} is a value, not a table"))
            return
        table = inner
    if isinstance(value, Mapping):
        table[key] = _merged(None if _is_whole_schedule(path, value) else table.get(key), value)
    elif value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _is_whole_schedule(path: str, value: object) -> bool:
    """True if ``value`` replaces the schedule at ``path``, rather than entries of it."""
    return path in SCHEDULED and isinstance(value, Mapping) and "schedule" in value


def _merged(into: object, patch: Mapping[str, object]) -> Table:
    """Merge by RFC 7396: mappings are merged, None removes, any other value replaces."""
    result: Table = dict(into) if isinstance(into, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value) if isinstance(value, Mapping) else value
    return result


def _plain(value: object, path: str, problems: list[Problem]) -> Any:
    """``value`` of lists, tables, strings and numbers only, which processes, files and HTTP can
    carry.
    """
    if isinstance(value, Mapping):
        problems += [
            Problem(path, None, f"has the key {key!r}, which is not text", "keys of type str")
            for key in value
            if not isinstance(key, str)
        ]
        return {
            str(key): _plain(inner, f"{path}.{key}".strip("."), problems)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(inner, path, problems) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if path in DURATIONS and isinstance(value, dt.time):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    problems += list(unportable(path, value)) or [_python_object(path, value)]
    return None


def _python_object(path: str, value: object) -> Problem:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if name is None:  # not a class or a function
        message = f"has the type {type(value).__name__}, which other processes cannot receive"
        return Problem(path, value, message, "text, a number, true or false, a list or a table")
    if module in {None, "__main__"} or "<" in name:
        message = "exists in this process only, so other processes cannot import it"
        return Problem(
            path, value, message, "'module:attribute' of an object in a module of its own"
        )
    return Problem(
        path,
        value,
        "is a Python object, which cannot be sent to other processes",
        "its name as a string",
        f"{module}:{name}",
    )


class _MadeConfig(Config):
    """Base of configs made at run time. They inherit their docstrings, and have no source file
    that pydantic could read them from.
    """

    model_config = ConfigDict(use_attribute_docstrings=False)


@cache
def _model(algorithm: type[AlgorithmSettings]) -> type[Config]:
    """`Config` with ``algorithm`` as its algorithm section, so that one validation finds all
    problems.
    """
    return create_model("Config", __base__=_MadeConfig, algorithm=(algorithm, ...))


def _checked(tables: Table) -> Config:
    """The config of ``tables``.

    The rules are those of strict JSON: ``"4"`` and ``true`` are not numbers, integers are valid
    floats, and lists are valid tuples.
    """
    if too_large := [problem for problem in unportable("", tables) if problem.message == TOO_LARGE]:
        raise ConfigError(too_large)  # other values are checked by their types first
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
                "one of " + ", ".join(algorithm_names()) + ", or module:attribute",
            )
        )
    tables = _fitted(tables, settings)
    try:
        parsed = _model(settings).model_validate_json(json.dumps(tables), strict=True)
    except ValidationError as error:
        given = name if isinstance(name, str) else ""
        found = problems_of(error, _model(settings), algorithm=given)
        raise ConfigError(innermost([*found, *problems])) from None
    if problems:
        raise ConfigError(problems)
    config = Config.model_validate(
        {section: getattr(parsed, section) for section in Config.model_fields}
    )
    # values such as 1e30 or "9999999TiB" are integers only after parsing
    if problems := config_rules.check(config):
        raise ConfigError(problems)
    return config


def _fitted(tables: Table, settings: type[AlgorithmSettings]) -> Table:
    """Adapt defaults to short rollouts and to replay. Settings that were given stay."""
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
        return fitted  # validation reports the problem
    _count_actors(fitted)
    balance, default = fitted.setdefault("balance", {}), settings.model_fields.get("minibatch_size")
    if isinstance(balance, dict):
        balance.setdefault("min_fragment_steps", max(1, min(8, steps)))
        if settings.window is not AlgorithmSettings.window:  # replayed items are stale on purpose
            balance.setdefault("max_staleness", "unbounded")
            balance.setdefault("controller", "sample_ratio")
    if default is not None and "minibatch_size" not in fitted["algorithm"]:
        fitted["algorithm"]["minibatch_size"] = max(1, min(default.default, samples))
    return fitted


def _count_actors(tables: Table) -> None:
    """Replace ``actors.count = "auto"`` by one actor a core; with central inference two, or three
    if it may be on a GPU, which another process shares. Cores of a learner on a CPU are not
    counted.
    """
    actors, learner = tables.get("actors"), tables.get("learner", {})
    if not isinstance(actors, dict) or actors.get("count") != "auto":
        return
    placement = tables.get("placement")
    launcher = placement.get("launcher") if isinstance(placement, dict) else None
    if (
        isinstance(launcher, str)
        and launcher not in ON_ONE_MACHINE
        and config_rules.capabilities_of(launcher).nodes
    ):
        message = f"the launcher {launcher} does not know the cores of its nodes in advance"
        raise ConfigError([Problem("actors.count", "auto", message, "a number")])
    free = cores()
    if isinstance(learner, dict) and not on_gpu(
        str(learner.get("device", "auto")), ranks := int(learner.get("ranks", 1))
    ):
        free -= ranks * int(learner.get("threads", 1))
    each = 1
    if actors.get("inference") == "central":
        inference = tables.get("inference")
        device = inference.get("device", "auto") if isinstance(inference, dict) else "auto"
        each = 3 if on_gpu(str(device), 1) else 2
    tables["actors"] = {**actors, "count": each * max(1, free)}


def _not_live(config: Config, section: str, key: str, value: object) -> Problem | None:
    live = live_of(config)
    if (section, key, value) == ("actors", "count", "auto"):
        message = "is resolved when a run starts, so it cannot be set later"
        return Problem("actors.count", value, message, "a number")
    if key in live.get(section, ()):
        return None
    if section in live and key not in type(getattr(config, section)).model_fields:
        return unknown_key(Config, (section, key), value, live=live)
    return Problem(
        f"{section}.{key}",
        value,
        "cannot change during a run; start a new run",
        f"live settings: {live_settings(config)}",
    )


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: object) -> str:
    """``value`` in TOML. Tables are inline, without entries of value None."""
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
