"""``tianflow export``: the policy of a checkpoint as a file for whoever deploys it."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tianflow.cli.common import RUNS, KeptArgument, RunsDir, exit_codes
from tianflow.export import ExportError

if TYPE_CHECKING:
    from tianflow.policy import LoadedPolicy
    from tianflow.rundir.checkpoints import Checkpoint

FORMAT = 1
"""Number of the layout of the metadata."""
SUFFIXES = (".pt2", ".onnx")


def write_export(checkpoint: str | Path, output: Path, *, runs_dir: Path) -> None:
    """Write the policy of ``checkpoint`` as ``output``, whole or not at all; a file that is there
    is replaced.

    Raises:
        ExportError: ``output`` cannot be written, or this policy not be exported.
        CheckpointError: there is no such checkpoint, or it is torn.
    """
    _require_writable(output)
    from tianflow import api
    from tianflow.export import formats
    from tianflow.export.deployed import Deployed
    from tianflow.rundir.checkpoints import CheckpointStore, resolve

    found = CheckpointStore.load(resolve(str(checkpoint), runs_dir))
    loaded = api.load_policy(found.path, runs_dir=runs_dir)
    write = formats.to_pt2 if output.suffix == ".pt2" else formats.to_onnx
    _replace(output, write(Deployed(loaded), metadata(found, loaded)))


def metadata(checkpoint: Checkpoint, loaded: LoadedPolicy) -> dict[str, Any]:
    """What a deployer may ask a file about its policy. A bound of None is none."""
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
            f"{str(output)!r} ends with no known suffix; accepted: {', '.join(SUFFIXES)}", bad=True
        )
    if output.is_dir():
        raise ExportError(f"{str(output)!r} is a folder; accepted: the name of a file", bad=True)
    if not output.parent.is_dir():
        raise ExportError(
            f"{str(output.parent)!r}, where the file is to be, is no folder", bad=True
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
    checkpoint: KeptArgument,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Where to; its suffix says what: .pt2 (PyTorch) or .onnx."
        ),
    ],
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write a policy as a program that needs no tianflow.

    Raw observations in, by the name of observation; actions out.
    """
    with exit_codes():
        write_export(checkpoint, output, runs_dir=runs_dir)
    typer.echo(str(output))
