"""`Manifest`: the model through which ``manifest.json`` of a checkpoint is read.

It bounds every number and name, because a manifest may come from another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, ValidationError

FORMAT = 1
"""Number of the layout that is written, and the only one that is read."""
LARGEST = 2**53
"""Largest count: every reader of JSON holds it exactly."""

Count = Annotated[StrictInt, Field(ge=0, le=LARGEST)]
Number = Annotated[StrictFloat | StrictInt, Field(ge=-1e300, le=1e300)]
Seconds = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1e12)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
Text = Annotated[str, Field(max_length=256)]


RESUMED = ("env_steps", "samples", "episodes", "elapsed_s", "config")
"""Entries without which a run cannot continue."""


class ManifestFormatError(ValueError):
    """A manifest has another layout than `FORMAT`."""


class _Part(BaseModel):
    """A table whose unknown entries are retained: newer versions may add some."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)


class FileRecord(_Part):
    """Hash and size of a file beside the manifest."""

    sha256: Sha256
    nbytes: Count


class LimiterRecord(_Part):
    """State of the rate limiter of replay."""

    inserts: Count
    samples: Count
    deletes: Count
    diff: Number
    samples_per_insert: Number
    min_diff: Number | None
    max_diff: Number | None


class BestRecord(_Part):
    """The evaluation by which a checkpoint became the best one of its run."""

    mean_return: Number
    episodes: Count
    only: bool
    """True if the checkpoint was written for this evaluation alone: without replay contents."""


class Manifest(_Part):
    """What a checkpoint says of itself. Checkpoints of older versions lack some fields."""

    format: StrictInt
    version: Annotated[list[Count], Field(min_length=2, max_length=2)]
    """Lineage, and number of updates."""
    created: Text
    state: FileRecord
    run: Text = ""
    revision: Count = 0
    """Revision of the settings in ``config``."""
    env_steps: Count = 0
    samples: Count = 0
    episodes: Count = 0
    elapsed_s: Seconds = 0.0
    trained_s: Seconds = 0.0
    config: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    recent_returns: Annotated[list[Number], Field(max_length=10_000)] = []
    evaluation: dict[str, Number] = {}
    best: BestRecord | None = None
    """Absent if the version was never the best one."""
    replay: LimiterRecord | None = None
    replay_files: Annotated[dict[FileName, FileRecord], Field(max_length=4096)] = {}


def check_manifest(found: object) -> dict[str, Any]:
    """``found``, the contents of ``manifest.json``, if `Manifest` accepts it.

    Raises:
        ManifestFormatError: it has another format.
        ValueError: it is not a manifest; one sentence that names the first problem.
    """
    if not isinstance(found, Mapping):
        raise ValueError("it is not an object")  # noqa: TRY004 - a file, not an argument
    if found.get("format", FORMAT) != FORMAT:
        raise ManifestFormatError(
            f"has format {str(found['format'])[:40]!r}; accepted: {FORMAT}; use the version of "
            "tianflow that wrote it"
        )
    try:
        Manifest.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part)[:40] for part in first["loc"])
        raise ValueError(f"{path}: {first['msg'][:200]}") from None
    return dict(found)
