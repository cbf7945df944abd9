"""rows of history -> Weights & Biases."""

from __future__ import annotations

from typing import Any

from tianflow.observability.sinks.base import SinkRun, points
from tianflow.rundir.history import Row


class WandB:
    """Entry point ``wandb``; a `tianflow.observability.sinks.base.Sink`. A resumed run goes on in
    its own.

    Args:
        run: its id is that of the run there.
        project: where it appears.
        settings: further arguments of ``wandb.init``, e.g. ``mode``, ``entity``, ``tags``. Keys
            belong into the environment.
    """

    packages = ("wandb",)
    extra = "wandb"

    def __init__(self, *, run: SinkRun, project: str = "tianflow", **settings: Any) -> None:
        import wandb

        usual = {"id": run.id, "name": run.id, "dir": str(run.directory), "resume": "allow"}
        self._run: Any = wandb.init(
            project=project, config=dict(run.config), **{**usual, **settings}
        )
        # not the step of W&B's own, which must grow: a resumed run may go back
        self._run.define_metric("env_steps", hidden=True)
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, row: Row) -> None:
        for point in points(row):
            self._run.log({**point.values, "env_steps": point.step})

    def close(self) -> None:
        self._run.finish()
