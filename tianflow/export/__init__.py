"""Exports a trained policy as one file that runs without tianflow: a PyTorch program (.pt2) or
ONNX. `tianflow.cli.export` is the command.
"""

from __future__ import annotations

from tianflow.errors import TianflowError


class ExportError(TianflowError):
    """A policy cannot be exported. ``bad``: the request was at fault."""

    def __init__(self, message: str, *, bad: bool = False) -> None:
        self.bad = bad
        super().__init__(message)
