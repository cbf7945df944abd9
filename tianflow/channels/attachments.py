"""The data of a trajectory on their way between machines: the rows written in its slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from numpy.typing import NDArray

from tianflow.channels.frames import MalformedMessageError, joined, pieces
from tianflow.channels.stacks import is_stacked, restack, unstacked
from tianflow.core.layout import written_rows
from tianflow.core.payloads import TrajectoryLayout

Encoding = Literal["stacks", "lz4", "plain"]
"""See ``cluster.encoding``."""
Views = Mapping[str, NDArray[Any]]
"""Arrays of one slot by field, all rows."""
BESIDE = 4096
"""Bytes that an encoding may need beside the arrays themselves."""


class Attachments:
    """Takes the data of trajectories out of slots, and writes them into the same slots elsewhere.

    Args:
        layout: of the slots, here and there.
        encoding: of what `of` returns. `write` accepts each.
    """

    def __init__(self, layout: TrajectoryLayout, encoding: Encoding = "plain") -> None:
        self._encoding = encoding
        self._rows = {length: written_rows(layout, length) for length in range(1, layout.steps + 1)}
        self._stacked = {
            field.name
            for field in layout.fields
            if is_stacked(field.name, field.shape, field.dtype)
        }

    def of(self, views: Views, length: int) -> dict[str, Any]:
        """The rows that a trajectory of ``length`` steps has written, encoded. Not copied, unless
        they are stacks of images or compressed: the slot must not change until they have arrived.
        """
        found: dict[str, Any] = {}
        for name, last in self._rows[length].items():
            array = views[name][:last]
            unpack = self._encoding != "plain" and name in self._stacked
            sent = unstacked(array) if unpack else None
            found[name] = pieces(array) if sent is None else sent
        if self._encoding == "lz4":
            from tianflow.channels.compression import compressed  # of this encoding only

            return {name: compressed(sent) for name, sent in found.items()}
        return found

    def write(self, views: Views, length: object, arrays: object) -> None:
        """Write what `of` returned elsewhere.

        Raises:
            MalformedMessageError: it does not fit into the slot.
        """
        rows = self._rows.get(length) if type(length) is int else None
        if rows is None:
            raise MalformedMessageError(f"no trajectory has the length {length!r:.20}")
        if not isinstance(arrays, dict) or arrays.keys() != rows.keys():
            raise MalformedMessageError("a trajectory has other fields than the run")
        for name, sent in arrays.items():
            place = views[name][: rows[name]]
            found = _decompressed(sent, place.nbytes) if isinstance(sent, dict) else sent
            stacked = isinstance(found, dict) and name in self._stacked
            (restack if stacked else joined)(place, found)


def _decompressed(sent: dict[str, Any], size: int) -> Any:
    """``sent`` for a place of ``size`` bytes. Stacks may need half as many again: those that repeat
    nothing are sent beside the others.
    """
    from tianflow.channels.compression import decompressed  # of one encoding only

    return decompressed(sent, size + size // 2 + BESIDE)
