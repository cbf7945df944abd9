"""A sink for MLflow."""

from __future__ import annotations

from typing import Any

from tianflow.interfaces import SinkRun
from tianflow.observability.sinks.base import flat, points
from tianflow.rundir.history import Row

TAG = "tianflow.run"
"""Tag of an MLflow run with the id of the tianflow run, so that a resumed run continues there."""
LONGEST = 500
"""Characters of a parameter's value that every MLflow store accepts."""
AT_ONCE = 100
"""Parameters in one request, the limit of MLflow."""


class MLflow:
    """Entry point ``mlflow``; a `tianflow.interfaces.Sink`. A resumed run continues
    its MLflow run.

    Args:
        run: its id is the name of the MLflow run.
        experiment: name of the MLflow experiment.
        tracking_uri: of the store, e.g. ``sqlite:///mlflow.db``; None: the default of MLflow, for
            example from the environment.
    """

    packages = ("mlflow",)
    extra = "mlflow"

    def __init__(
        self, *, run: SinkRun, experiment: str = "tianflow", tracking_uri: str | None = None
    ) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        self._client: Any = MlflowClient(tracking_uri=tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        where = self._client.create_experiment(experiment) if known is None else known.experiment_id
        found = self._client.search_runs(
            [where], filter_string=f"tags.`{TAG}` = '{run.id}'", max_results=1
        )
        if found:
            self._id: str = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(where, run_name=run.id, tags={TAG: run.id}).info.run_id
        parameters = [Param(name, str(value)[:LONGEST]) for name, value in flat(run.config).items()]
        for at in range(0, len(parameters), AT_ONCE):
            self._client.log_batch(self._id, params=parameters[at : at + AT_ONCE])

    def write(self, row: Row) -> None:
        for point in points(row):
            at = int(point.time * 1000.0)
            # some versions of MLflow refuse a colon in a name
            metrics = [
                self._metric(name.replace(":", "."), value, at, point.step)
                for name, value in point.values.items()
            ]
            self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)
