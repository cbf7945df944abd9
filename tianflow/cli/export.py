"""``tianflow export``: writes the policy of a checkpoint as a file for deployment."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tianflow.cli.common import (
    RUNS,
    Best,
    CheckpointArgument,
    RunsDir,
    Trust,
    best_of,
    echo,
    exit_codes,
)
from tianflow.export import ExportError

if TYPE_CHECKING:
    from tianflow.policy import LoadedPolicy
    from tianflow.rundir.checkpoints import Checkpoint

FORMAT = 1
"""Version of the metadata format."""
SUFFIXES = (".pt2", ".onnx")


def write_export(
    checkpoint: str | Path, output: Path, *, runs_dir: Path, trust: bool = False
) -> None:
    """Write the policy of ``checkpoint`` to ``output``, whole or not at all. An existing file is
    replaced.

    Raises:
        ExportError: ``output`` cannot be written, or this policy cannot be exported.
        CheckpointError: the checkpoint does not exist, or is torn.
    """
    _require_writable(output)
    output = output.absolute()  # a policy's own code may change the working directory
    from tianflow import api
    from tianflow.export import formats
    from tianflow.export.deployed import Deployed
    from tianflow.rundir.checkpoints import CheckpointStore, resolve

    found = CheckpointStore.load(resolve(str(checkpoint), runs_dir).absolute())
    loaded = api.load_policy(found.path, runs_dir=runs_dir, trust=trust)
    write = formats.to_pt2 if output.suffix == ".pt2" else formats.to_onnx
    _replace(output, write(Deployed(loaded), metadata(found, loaded)))


def metadata(checkpoint: Checkpoint, loaded: LoadedPolicy) -> dict[str, Any]:
    """Metadata for deployment. A bound of None means unbounded."""
    from tianflow import __version__

    config, action = loaded.config, asdict(loaded.spec.action)
    bounds = {
        name: [bound if math.isfinite(bound) else None for bound in action[name]]
        for name in ("low", "high")
    }
    return {
        "format": FORMAT,
        "tianflow": __version__,
        "algorithm": config.algorithm.name,
        "environment": {
            "id": config.env.id,
            "kwargs": dict(config.env.kwargs),
            "wrappers": list(config.env.wrappers),
        },
        "checkpoint": {
            "version": list(checkpoint.version),
            "env_steps": checkpoint.manifest.get("env_steps", 0),
            "created": checkpoint.manifest["created"],
            "sha256": checkpoint.manifest["state"]["sha256"],
        },
        "action_space": action | bounds,
    }


def _require_writable(output: Path) -> None:
    if output.suffix not in SUFFIXES:
        raise ExportError(
            f"{str(output)!r} has an unknown suffix; accepted: {', '.join(SUFFIXES)}", bad=True
        )
    if output.is_dir():
        raise ExportError(f"{str(output)!r} is a directory; accepted: the name of a file", bad=True)
    if not output.parent.is_dir():
        raise ExportError(
            f"{str(output.parent)!r} is not a directory; create it, or choose another --output",
            bad=True,
        )


def _replace(output: Path, data: bytes) -> None:
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ExportError(f"the policy cannot be written: {error}") from None


def export(
    checkpoint: CheckpointArgument,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Output file; its suffix selects .pt2 (PyTorch) or .onnx."
        ),
    ],
    runs_dir: RunsDir = RUNS,
    best: Best = False,
    trust: Trust = False,
) -> None:
    """Write a policy as a program that runs without tianflow.

    Its inputs are raw observations by name, its outputs are actions.
    """
    with exit_codes():
        source = best_of(checkpoint) if best else checkpoint
        write_export(source, output, runs_dir=runs_dir, trust=trust)
    echo(str(output))
