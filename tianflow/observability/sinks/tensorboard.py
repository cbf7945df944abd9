"""A sink for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tianflow.interfaces import SinkRun
from tianflow.observability.sinks.base import points
from tianflow.rundir.history import Row


class TensorBoard:
    """Entry point ``tensorboard``; a `tianflow.interfaces.Sink`. Writes scalars over
    environment steps, and the config as text.

    Args:
        run: files go to ``tensorboard`` in its directory, so that ``tensorboard --logdir runs``
            shows every run.
        directory: another directory for the files.
        flush_s: seconds after which data is in the file.
    """

    packages = ("tensorboard",)
    extra = "tensorboard"

    def __init__(
        self, *, run: SinkRun, directory: str | None = None, flush_s: float = 10.0
    ) -> None:
        # This writer is the one below PyTorch's `SummaryWriter`. The latter would import PyTorch
        # into the coordinator.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self._event: Any = Event
        self._summary: Any = Summary
        folder = run.directory / "tensorboard" if directory is None else Path(directory)
        self._writer: Any = EventFileWriter(str(folder), flush_secs=flush_s)
        text = "    " + json.dumps(run.config, indent=2).replace(
            "\n", "\n    "
        )  # a block of code in Markdown
        metadata = create_summary_metadata(display_name="config", description="")
        value = Summary.Value(
            tag="config/text_summary", metadata=metadata, tensor=make_tensor_proto([text.encode()])
        )
        self._writer.add_event(Event(step=0, summary=Summary(value=[value])))

    def write(self, row: Row) -> None:
        for point in points(row):
            values = [
                self._summary.Value(tag=name, simple_value=number)
                for name, number in point.values.items()
            ]
            self._writer.add_event(
                self._event(
                    wall_time=point.time, step=point.step, summary=self._summary(value=values)
                )
            )

    def close(self) -> None:
        self._writer.close()
