"""Checks of a resume: settings against the checkpoint that the run continues.

A learner can load a checkpoint only into the same algorithm and network over the same spaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tianflow.config import spaces
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import CheckpointError, ConfigError, Problem
from tianflow.rundir.checkpoints import CheckpointStore, resolve

ENVIRONMENT = ("id", "kwargs", "wrappers", "vectorization")
"""Settings of ``env`` that can change the spaces."""
SAVED = {
    "network": ("name", "hidden", "activation", "lstm", "share_torso", "kwargs"),
    "algorithm": ("name", "duelling"),
}
"""Settings by section that decide which arrays a learner saves, and what they mean."""
NORMALISATION = ("observations", "images", "returns")
CONSEQUENCE = "so the saved state cannot be loaded"
_MISSING = object()


def read_environment(document: object) -> EnvironmentSpec | None:
    """The specification in a manifest (`tianflow.config.spaces`); None if it is not one."""
    try:
        return spaces.from_json(document)
    except CheckpointError:
        return None


def check_resume(
    config: Config, spec: EnvironmentSpec, manifest: Mapping[str, Any]
) -> list[Problem]:
    """Problems of a run under ``config`` that continues the checkpoint of ``manifest``.

    Args:
        config: settings of the resumed run.
        spec: of its environments.
        manifest: of the checkpoint. Checkpoints of older versions do not record their spaces;
            there ``env.id`` must be the same.
    """
    saved = manifest["config"]
    if not isinstance(saved, Mapping):
        return []
    wanted = json.loads(config.model_dump_json())
    problems = list(_changed(saved, wanted))
    if (saw := _saw_previous_step(saved, config)) != config.previous_step:
        # The spaces differ, too, by the leaves of the previous step.
        message = f"the checkpoint was written with {saw}, {CONSEQUENCE}"
        path, value = "network.previous_step", config.network.previous_step
        return [*problems, _problem(path, value, message, saw)]
    before = read_environment(manifest.get("environment"))
    if before is None:
        if (old := _at(saved, "env", "id")) not in (_MISSING, config.env.id):
            problems.append(
                _problem(
                    "env.id",
                    config.env.id,
                    f"the checkpoint is of {old!r} and does not record its spaces, so nothing "
                    "shows that its policy fits",
                    old,
                )
            )
    elif differing := difference(before, spec):
        path, old = next(
            (
                (f"env.{key}", before_value)
                for key in ENVIRONMENT
                if (before_value := _at(saved, "env", key)) != _at(wanted, "env", key)
            ),
            ("env.id", before.id),
        )
        value = wanted["env"][path.removeprefix("env.")]
        problems.append(_problem(path, value, f"{differing}, {CONSEQUENCE}", old))
    return problems


def require_resume(config: Config, spec: EnvironmentSpec, source: str, runs_dir: Path) -> None:
    """Refuse a run under ``config`` that cannot continue the run or checkpoint ``source``.

    Raises:
        CheckpointError: the checkpoint does not exist, or is damaged.
        ConfigError: see `check_resume`.
    """
    checkpoint = CheckpointStore.load(resolve(source, runs_dir))
    if problems := check_resume(config, spec, checkpoint.manifest):
        raise ConfigError(problems)


def saved_settings(manifest: Mapping[str, Any]) -> Any:
    """The settings of a checkpoint as a document to read with `Config`.

    Versions before ``network.previous_step`` wrote no such key, and no network saw the previous
    step.
    """
    saved = manifest["config"]
    if not isinstance(saved, Mapping) or not isinstance(saved.get("network"), Mapping):
        return saved
    return {**saved, "network": {"previous_step": False, **saved["network"]}}


def older_defaults(manifest: Mapping[str, Any]) -> list[str]:
    """Overrides with which the settings of an older version mean what they meant there."""
    written = _at(manifest, "config", "network", "previous_step")
    return ["network.previous_step=false"] if written is _MISSING else []


def _saw_previous_step(saved: Mapping[str, Any], config: Config) -> bool:
    given = _at(saved, "network", "previous_step")
    if given is _MISSING:
        return False
    return config.algorithm.previous_step if given is None else bool(given)


def _changed(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Problem]:
    """Settings that decide about saved arrays and differ. A setting that the checkpoint does not
    know is skipped: it belongs to another algorithm or version.
    """
    paths: list[tuple[str, ...]] = [
        (section, key) for section, keys in SAVED.items() for key in keys
    ]
    paths += [("env", "normalisation", key) for key in NORMALISATION]
    another = _at(saved, "algorithm", "name") != _at(wanted, "algorithm", "name")
    for path in paths:
        old, new = _at(saved, *path), _at(wanted, *path)
        if old is _MISSING or new is _MISSING or old == new or (another and path[-1] == "duelling"):
            continue
        yield _problem(
            ".".join(path), new, f"the checkpoint was written with {old!r}, {CONSEQUENCE}", old
        )


def _problem(path: str, value: object, message: str, old: object) -> Problem:
    accepted = "the value of the checkpoint" if old is _MISSING else repr(old)
    return Problem(path, value, message, f"{accepted}; or start a new run, without --resume")


def difference(
    old: EnvironmentSpec,
    new: EnvironmentSpec,
    *,
    old_name: str = "the checkpoint",
    new_name: str = "the environment",
) -> str:
    """The first part of ``old`` that differs from ``new``, beside that of ``new``; "" without a
    difference. The names are those of both sides in the text.
    """
    leaves = [
        {leaf.name: f"{leaf.dtype}{list(leaf.shape)}{_of(leaf.categories)}" for leaf in spec}
        for spec in (old.observation, new.observation)
    ]
    if leaves[0] != leaves[1]:
        texts = [
            ", ".join(f"{name or 'observation'} {text}" for name, text in part.items())
            for part in leaves
        ]
        return f"{old_name} has observations {texts[0]}, {new_name} {texts[1]}"
    actions = [
        f"{spec.action.kind} {list(spec.action.stored_shape)}{_of(spec.action.categories)}"
        for spec in (old, new)
    ]
    if actions[0] != actions[1]:
        return f"{old_name} has actions {actions[0]}, {new_name} {actions[1]}"
    if (old.action.low, old.action.high) != (new.action.low, new.action.high):
        return (
            f"{old_name} has actions from {list(old.action.low)} to {list(old.action.high)}, "
            f"{new_name} from {list(new.action.low)} to {list(new.action.high)}"
        )
    if old.action_mask != new.action_mask:
        return (
            f"{old_name} has an action mask, {new_name} has no mask"
            if old.action_mask
            else f"{old_name} has no action mask, {new_name} has one"
        )
    return ""


def _of(categories: tuple[int, ...]) -> str:
    return f" of {'x'.join(map(str, categories))}" if categories else ""


def _at(tables: Mapping[str, Any], *path: str) -> Any:
    value: Any = tables
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value
