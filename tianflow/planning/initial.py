"""Initial state of a run that starts with the parameters of another one (``run.init_from``).

The source is data: its arrays and the names in them are read, and nothing that its settings name is
imported. The network of the new run is made in a child process, because this one never imports
PyTorch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.numpy

from tianflow.config import spaces
from tianflow.config.imports import RUN_NAME
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import CheckpointError, ConfigError, Problem
from tianflow.planning.resuming import difference, read_environment
from tianflow.rundir.checkpoints import Checkpoint, CheckpointStore, resolve
from tianflow.rundir.parameters import Fit, lines

PATH = "run.init_from"
ACCEPTED = (
    "the name of a run in the directory of runs, RUN@best for its best checkpoint, or the "
    "directory of a run or checkpoint"
)
MOST_DIFFERENCES = 10
"""Number of different settings that are listed."""
LONGEST = 60
"""Characters of a value that are shown."""
COMPARED = {
    "env": ("id", "kwargs", "set", "wrappers", "normalisation"),
    "network": None,
    "algorithm": None,
}
"""Settings that are compared with those of the source; None: all of the section."""
_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "import tianflow.algorithms.common.transfer as t; gc.freeze(); gc.enable(); "
    "t.main(*map(int, sys.argv[2:]))"
)
"""Imports make hardly any garbage. Looking for it, also when the interpreter ends, takes a third of
the child's time.
"""


@dataclass(frozen=True, slots=True)
class InitialState:
    """Contents of the first state file of a new run, and their origin."""

    source: Path
    data: bytes
    fit: Fit
    differences: tuple[str, ...]

    def notes(self) -> Iterator[str]:
        """Sentences that are printed when the run starts."""
        if self.differences:
            shown = self.differences[:MOST_DIFFERENCES]
            more = len(self.differences) - len(shown)
            rest = f"; {more} more" if more else ""
            yield f"run.init_from: differences from the source: {'; '.join(shown)}{rest}"
        taken = f"run.init_from: {len(self.fit.taken)} parameters are those of {self.source}"
        unfit = "; ".join(lines(self.fit))
        yield f"{taken}; these are not taken: {unfit}" if unfit else f"{taken}; all fit"


def find_source(source: str, runs_dir: Path) -> Checkpoint:
    """The checkpoint that ``run.init_from`` names. Its hash is verified.

    Raises:
        ConfigError: it does not exist, or is damaged.
    """
    try:
        found = resolve(source, runs_dir, only_runs=RUN_NAME.fullmatch(source) is not None)
        return CheckpointStore.load(found.absolute())
    except CheckpointError as error:
        raise _refused(source, str(error), ACCEPTED) from error


def initial_state(config: Config, spec: EnvironmentSpec, checkpoint: Checkpoint) -> InitialState:
    """The state of a new learner under ``config`` with the parameters of ``checkpoint`` that fit.

    Raises:
        ConfigError: nothing fits, the checkpoint does not name its parameters, or the algorithm of
            ``config`` does not name its own.
    """
    source = config.run.init_from or str(checkpoint.path)
    try:
        parameters = checkpoint.parameters()
    except CheckpointError as error:
        raise _refused(source, str(error), ACCEPTED) from error
    answer, data = _compute(config, spec, parameters)
    if answer["fit"] is None:
        message = f"{config.algorithm.name} does not name its parameters, so none can be replaced"
        accepted = "an algorithm that implements tianflow.interfaces.TransfersParameters"
        raise _refused(source, message, accepted)
    fields = answer["fit"]
    found = Fit(
        taken=tuple(fields["taken"]),
        differing=tuple((name, there, here) for name, there, here in fields["differing"]),
        apart=tuple(fields["apart"]),
        new=tuple(fields["new"]),
        unused=tuple(fields["unused"]),
    )
    if not any("network/" in name for name in found.taken):
        before = _settings(checkpoint).get("algorithm")
        name = before.get("name") if isinstance(before, Mapping) else None
        message = (
            f"no parameter of the network fits this run: the source is of {name}, the run of "
            f"{config.algorithm.name}; {'; '.join(lines(found))}"
        )
        raise _refused(source, message, "a source with a network like that of this run")
    return InitialState(checkpoint.path, data, found, tuple(_differences(config, spec, checkpoint)))


def check_source(config: Config, spec: EnvironmentSpec | None, runs_dir: Path) -> tuple[str, ...]:
    """Refuse ``run.init_from`` as the start of a new run does; its notes are returned. Without
    ``spec``, only the source itself is checked.

    Raises:
        ConfigError: see `find_source` and `initial_state`.
    """
    if config.run.init_from is None:
        return ()
    source = find_source(config.run.init_from, runs_dir)
    return () if spec is None else tuple(initial_state(config, spec, source).notes())


def _refused(source: str, message: str, accepted: str) -> ConfigError:
    return ConfigError([Problem(PATH, source, message, accepted)])


def _compute(
    config: Config, spec: EnvironmentSpec, there: Mapping[str, Any]
) -> tuple[dict[str, Any], bytes]:
    """Answer and state file of `tianflow.algorithms.common.transfer.main`."""
    order = {"config": json.loads(config.model_dump_json()), "environment": spaces.to_json(spec)}
    with ExitStack() as stack:
        files = []
        for name in ("order", "source", "answer", "state"):
            files.append(os.memfd_create(name))
            stack.callback(os.close, files[-1])
        _fill(files[0], json.dumps(order).encode())
        _fill(files[1], safetensors.numpy.save(dict(there)))
        limit = config.env.start_timeout_s
        try:
            done = subprocess.run(  # noqa: S603 - the interpreter itself
                [
                    *(sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)),
                    *map(str, files),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # not the caller's, where it would mix with what a command prints
                pass_fds=files,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"the learner was not made within env.start_timeout_s = {limit:g} s"
            raise _refused(str(config.run.init_from), message, "a longer limit") from None
        if done.returncode:
            message = f"the learner could not be made (exit status {done.returncode})"
            raise _refused(str(config.run.init_from), message, "settings that train without it")
        return json.loads(_contents(files[2])), _contents(files[3])


def _fill(descriptor: int, data: bytes) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)


def _contents(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()


def _settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    found = checkpoint.manifest.get("config")
    return found if isinstance(found, Mapping) else {}


def _differences(config: Config, spec: EnvironmentSpec, source: Checkpoint) -> Iterator[str]:
    """Phrases for spaces and settings that differ from those of ``source``."""
    before = read_environment(source.manifest.get("environment"))
    if before is not None and (text := difference(before, spec, old_name="the source")):
        yield text
    wanted, saved = json.loads(config.model_dump_json()), _settings(source)
    for section, keys in COMPARED.items():
        there, here = saved.get(section), wanted[section]
        if not isinstance(there, Mapping):
            continue
        for key in keys or here:
            if key in there and there[key] != here[key]:
                yield from _changed(f"{section}.{key}", there[key], here[key])


def _changed(path: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                yield from _changed(f"{path}.{key}", old.get(key), new.get(key))
    else:
        yield f"{path} {_short(old)} -> {_short(new)}"


def _short(value: object) -> str:
    text = "none" if value is None else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
