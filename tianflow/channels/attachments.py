"""Parts of slots on their way between machines: the rows that a trajectory has written, the columns
that a replay shard has drawn, and priorities of columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tianflow.channels.frames import MalformedMessageError, joined, pieces
from tianflow.channels.stacks import is_stacked, restack, unstacked
from tianflow.core.layout import column_axis, written_rows
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
        self._rows = {length: written_rows(layout, length) for length in range(1, layout.steps + 1)}
        self._encoder = _Encoder(layout, encoding)

    def of(self, views: Views, length: int) -> dict[str, Any]:
        """The rows that a trajectory of ``length`` steps has written, encoded. Not copied, unless
        they are stacks of images or compressed: the slot must not change until they have arrived.
        """
        return {
            name: self._encoder.encoded(name, views[name][:last])
            for name, last in self._rows[length].items()
        }

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
            self._encoder.decode(name, views[name][: rows[name]], sent)


PRIORITY = "priority"
AT_SHARD = ("key", "weight")
"""Fields of a draw that do not travel: its shard reads the keys, the head writes the weights."""


class DrawParts:
    """Takes columns of draws out of slots, and writes them into the same slots elsewhere.

    Args:
        layout: of the slots of draws, here and there.
        encoding: of what `of` returns. `write` accepts each.
    """

    def __init__(self, layout: TrajectoryLayout, encoding: Encoding = "plain") -> None:
        self._items, self._encoder = layout.num_envs, _Encoder(layout, encoding)
        self._fields = {field.name for field in layout.fields} - set(AT_SHARD)
        self._flat = {field.name for field in layout.fields if column_axis(field.name) == 0}

    def of(self, views: Views, first: int, items: int) -> dict[str, Any]:
        """Columns from ``first`` on as a shard has drawn them, copied and encoded."""
        return {
            name: self._encoder.encoded(
                name, np.ascontiguousarray(self._columns(views, name, first, items))
            )
            for name in self._fields
        }

    def priorities(self, views: Views, first: int, items: int) -> dict[str, Any]:
        """Priorities of columns from ``first`` on. Not copied."""
        return {PRIORITY: pieces(views[PRIORITY][first : first + items])}

    def write(self, views: Views, first: object, items: object, arrays: object) -> None:
        """Write what `of` returned elsewhere.

        Raises:
            MalformedMessageError: it does not fit into the slot.
        """
        self._write(views, first, items, arrays, self._fields)

    def write_priorities(self, views: Views, first: object, items: object, arrays: object) -> None:
        """Write what `priorities` returned elsewhere. Raises as `write`."""
        self._write(views, first, items, arrays, (PRIORITY,))

    def _write(
        self, views: Views, first: object, items: object, arrays: object, names: Collection[str]
    ) -> None:
        if type(first) is not int or type(items) is not int:
            raise MalformedMessageError("columns of a draw are not numbers")
        if not 0 <= first < first + items <= self._items:
            raise MalformedMessageError(f"no draw has {items} columns from {first} on")
        if not isinstance(arrays, dict) or arrays.keys() != set(names):
            raise MalformedMessageError("columns of a draw have other fields than the run")
        for name, sent in arrays.items():
            self._encoder.decode(name, self._columns(views, name, first, items), sent)

    def _columns(self, views: Views, name: str, first: int, items: int) -> NDArray[Any]:
        part = slice(first, first + items)
        return views[name][part] if name in self._flat else views[name][:, part]


class _Encoder:
    """Encodes and decodes single fields."""

    def __init__(self, layout: TrajectoryLayout, encoding: Encoding) -> None:
        self._encoding = encoding
        self._stacked = {
            field.name
            for field in layout.fields
            if is_stacked(field.name, field.shape, field.dtype)
        }

    def encoded(self, name: str, array: NDArray[Any]) -> Any:
        """``array`` of field ``name``. Not copied, unless it has stacks or is compressed."""
        unpack = self._encoding != "plain" and name in self._stacked
        stacks = unstacked(array) if unpack else None
        sent = pieces(array) if stacks is None else stacks
        if self._encoding == "lz4":
            from tianflow.channels.compression import compressed  # of this encoding only

            return compressed(sent)
        return sent

    def decode(self, name: str, place: NDArray[Any], sent: Any) -> None:
        """Write what `encoded` made into ``place``. Raises MalformedMessageError."""
        found = _decompressed(sent, place.nbytes) if isinstance(sent, dict) else sent
        stacked = isinstance(found, dict) and name in self._stacked
        (restack if stacked else joined)(place, found)


def _decompressed(sent: dict[str, Any], size: int) -> Any:
    """``sent`` for a place of ``size`` bytes. Stacks may need half as many again: those that repeat
    nothing are sent beside the others.
    """
    from tianflow.channels.compression import decompressed  # of one encoding only

    return decompressed(sent, size + size // 2 + BESIDE)
