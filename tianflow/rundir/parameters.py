"""Named parameters in the state of a checkpoint, and the `Fit` of those of two learners.

The state file holds flat arrays. Its metadata name the parameters in them, so that another run can
take them without making the network that wrote them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, StrictInt, TypeAdapter, ValidationError

from tianflow.core.payloads import WeightsTable

KEY = "parameters"
"""Key of the names in the metadata of a state file."""
PUBLISHED = "flat"
"""Array with the published weights. Names in other arrays begin with the name of the array."""
UNNAMED = (
    "does not name its parameters, because an older version or a plug-in wrote it; continue that "
    "run with --resume for a checkpoint that does"
)
OWN = "exploration/"
"""Beginning of names whose values follow from the settings of a run."""
LARGEST = 2**40

_Name = Annotated[str, Field(min_length=1, max_length=512)]
_Size = Annotated[StrictInt, Field(ge=0, le=LARGEST)]
_Row = tuple[
    _Name, Literal["float32", "float64"], Annotated[list[_Size], Field(max_length=16)], _Size
]
_TABLES = TypeAdapter(
    dict[_Name, Annotated[list[_Row], Field(max_length=1_000_000)]],
    config=ConfigDict(hide_input_in_errors=True),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """What a new learner takes from another one, by name.

    Attributes:
        taken: same name and shape on both sides.
        differing: same name, another shape: name, shape there, shape here.
        apart: would fit alone, but belongs to moments of a normaliser that do not.
        new: only here.
        unused: only there.
    """

    taken: tuple[str, ...]
    differing: tuple[tuple[str, str, str], ...]
    apart: tuple[str, ...]
    new: tuple[str, ...]
    unused: tuple[str, ...]


def encode_tables(tables: Mapping[str, WeightsTable]) -> dict[str, str]:
    """Metadata of a state file with these tables; empty without tables."""
    if not tables:
        return {}
    rows = {
        array: [
            [entry.name, entry.dtype, list(entry.shape), entry.offset] for entry in table.entries
        ]
        for array, table in tables.items()
    }
    return {KEY: json.dumps(rows, separators=(",", ":"))}


def read_parameters(
    arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> dict[str, NDArray[Any]]:
    """Copies of the parameters in ``arrays`` by name.

    Raises:
        ValueError: ``metadata`` have no names, or names that do not fit the arrays. Its text
            continues a sentence about the checkpoint.
    """
    if KEY not in metadata:
        raise ValueError(UNNAMED)
    try:
        tables = _TABLES.validate_json(metadata[KEY])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ValueError(f"has damaged names of parameters: {first['msg'][:200]}") from None
    named: dict[str, NDArray[Any]] = {}
    for array, rows in tables.items():
        if array not in arrays:
            raise ValueError(f"names parameters of {array!r}, an array that it lacks")
        data = np.ascontiguousarray(arrays[array]).reshape(-1).view(np.uint8)
        for name, dtype, shape, offset in rows:
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            full = full_name(array, name)
            if offset + nbytes > data.nbytes or full in named:
                what = "twice" if full in named else f"beyond the end of {array!r}"
                raise ValueError(f"names the parameter {full!r} {what}")
            part = data[offset : offset + nbytes].tobytes()
            named[full] = np.frombuffer(part, dtype).reshape(shape)
    return named


def full_name(array: str, name: str) -> str:
    """Name of a parameter among those of all arrays."""
    return name if array in (PUBLISHED, name) else f"{array}/{name}"


def fit(there: Mapping[str, NDArray[Any]], here: Mapping[str, NDArray[Any]]) -> Fit:
    """What a learner with the parameters ``here`` takes of those ``there``.

    Moments of a normaliser belong together: their count alone would belong to other means.
    """
    ours = {name: array for name, array in here.items() if not name.startswith(OWN)}
    theirs = {name: array for name, array in there.items() if not name.startswith(OWN)}
    differing = [
        (name, _described(theirs[name]), _described(array))
        for name, array in ours.items()
        if name in theirs and _described(theirs[name]) != _described(array)
    ]
    new = [name for name in ours if name not in theirs]
    unfit = {*new, *(name for name, *_ in differing)}
    groups = {_group(name) for name in unfit}
    common = [name for name in ours if name not in unfit]
    return Fit(
        taken=tuple(name for name in common if _group(name) not in groups),
        differing=tuple(differing),
        apart=tuple(name for name in common if _group(name) in groups),
        new=tuple(new),
        unused=tuple(name for name in theirs if name not in ours),
    )


def lines(found: Fit) -> Iterator[str]:
    """Phrases that name every parameter that does not fit."""
    if found.differing:
        pairs = (f"{name} ({there}, here {here})" for name, there, here in found.differing)
        yield f"of another shape: {', '.join(pairs)}"
    if found.apart:
        yield f"part of moments that do not fit: {', '.join(found.apart)}"
    if found.new:
        yield f"only in this run: {', '.join(found.new)}"
    if found.unused:
        yield f"only in the source: {', '.join(found.unused)}"


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _group(name: str) -> str:
    """Name of the parameters that are taken together."""
    network = name.startswith("network/") or "/network/" in name
    return name if network else name.rpartition("/")[0] or name
