"""A sink for Weights & Biases."""

from __future__ import annotations

from typing import Any

from tianflow.interfaces import SinkRun
from tianflow.observability.sinks.base import points
from tianflow.rundir.history import Row


class WandB:
    """Entry point ``wandb``; a `tianflow.interfaces.Sink`. A resumed run continues
    its W&B run.

    Args:
        run: its id is the id of the W&B run.
        project: name of the W&B project.
        settings: further arguments of ``wandb.init``, e.g. ``mode``, ``entity``, ``tags``. Keys
            belong in the environment.
    """

    packages = ("wandb",)
    extra = "wandb"

    def __init__(self, *, run: SinkRun, project: str = "tianflow", **settings: Any) -> None:
        import wandb

        defaults = {"id": run.id, "name": run.id, "dir": str(run.directory), "resume": "allow"}
        self._run: Any = wandb.init(
            project=project, config=dict(run.config), **{**defaults, **settings}
        )
        # the step of W&B itself must grow, but a resumed run may go back
        self._run.define_metric("env_steps", hidden=True)
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, row: Row) -> None:
        for point in points(row):
            self._run.log({**point.values, "env_steps": point.step})

    def close(self) -> None:
        self._run.finish()
