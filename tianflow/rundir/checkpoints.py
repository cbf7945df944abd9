"""What a run leaves on disk to go on from: arrays in safetensors, a JSON manifest, and no
half-written file that counts.

    learner: write_state(staged) -> coordinator: publish(staged) ->
        <run>/checkpoints/v<lineage>-<number>/

A checkpoint is written into a staged directory, synced and renamed, so a name that is there was
whole when it got it. What happened to it since is found out by its hash, whenever it is loaded.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from tianflow import plugins
from tianflow.config.loading import CONFIG_FILE
from tianflow.core.payloads import StateFile, Version
from tianflow.errors import CheckpointError
from tianflow.logs import logger

FORMAT = 1
"""Number of the layout that is written, and the only one that is read."""
STATE, MANIFEST = "state.safetensors", "manifest.json"
_STAGED = ".tmp-"
_NAME = re.compile(r"v(\d+)-(\d{10,})")
_RESERVED = frozenset({"format", "version", "created", "state"})

_log = logger("checkpoint")


def write_state(path: Path, arrays: Mapping[str, NDArray[Any]]) -> StateFile:
    """Write ``arrays`` into the staged directory ``path``, and sync. Called where the arrays are:
    in the learner's process.

    Args:
        path: what `CheckpointStore.stage` answered. It is removed if anything goes wrong.
        arrays: any shapes; dtypes are those of safetensors (bool, integers, float16/32/64,
            complex64).

    Raises:
        CheckpointError: an array is not finite or has another dtype, or the system refuses (the
            disk is full, say).
    """
    try:
        with _as_checkpoint_errors(path):
            data = _serialized(arrays)
            _write_synced(path / STATE, data)
            return StateFile(hashlib.sha256(data).hexdigest(), len(data))
    except CheckpointError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> StateFile:
    """Write ``arrays`` as the file ``path``, and sync. What is not finite is written, too: replay
    knows values that nobody computed.

    Raises:
        CheckpointError: the system refuses.
    """
    with _as_checkpoint_errors(path):
        safetensors.numpy.save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()}, path
        )
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return StateFile(
                hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
            )


def read_arrays(checkpoint: Checkpoint, name: str) -> dict[str, NDArray[Any]] | None:
    """What `write_arrays` wrote beside the state of ``checkpoint``; None if it was not kept there.

    Raises:
        CheckpointError: it is torn or corrupt.
    """
    kept = checkpoint.manifest.get("replay_files", {}).get(name)
    if kept is None:
        return None
    path = checkpoint.path / name
    _verify(path, StateFile(kept["sha256"], kept["nbytes"]))
    with _as_checkpoint_errors(path):
        return safetensors.numpy.load_file(path)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose hash was right when it was loaded. ``manifest``: what was published with
    it, and how.
    """

    path: Path
    version: Version
    manifest: Mapping[str, Any]

    def read(self) -> dict[str, NDArray[Any]]:
        """Its arrays, as new memory.

        Raises:
            CheckpointError: the file changed after it was loaded.
        """
        with _as_checkpoint_errors(self.path):
            return safetensors.numpy.load_file(self.path / STATE)


class CheckpointStore:
    """The checkpoints of one run. Everything here waits for the disk: call it from a thread that
    may.

    Args:
        directory: ``<run>/checkpoints``; made when it is needed.
        keep: how many whole checkpoints stay.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(
                f"keep = {keep}: every checkpoint would be deleted as soon as it is written; "
                "accepted: 1 or more"
            )
        self._directory, self._keep = directory, keep

    def stage(self) -> Path:
        """A fresh directory to write into.

        Raises:
            CheckpointError: the system refuses.
        """
        with _as_checkpoint_errors(self._directory):
            staged = self._directory / f"{_STAGED}{secrets.token_hex(8)}"
            staged.mkdir(parents=True)
            return staged

    def publish(
        self, staged: Path, *, version: Version, state: StateFile, manifest: Mapping[str, object]
    ) -> Path:
        """Give a staged directory its name, after checking that it holds what ``state`` says;
        delete surplus ones.

        A version that is there already gets the new manifest. The checkpoints before it are touched
        only once it is safe.

        Raises:
            CheckpointError: the file is not what ``state`` says, the manifest is not strict JSON,
                or the system refuses. The staged directory is removed then.
            ValueError: ``manifest`` uses one of the names format, version, created, state.
        """
        if taken := _RESERVED & manifest.keys():
            raise ValueError(
                f"a manifest may not hold {', '.join(sorted(taken))}: publish writes them itself"
            )
        target = self._directory / f"v{version.lineage}-{version.number:010d}"
        try:
            with _as_checkpoint_errors(staged):
                _verify(staged / STATE, state)
                _write_synced(staged / MANIFEST, _described(version, state, manifest))
                _sync_directory(staged)
                _move_into_place(staged, target, state)
                _sync_directory(self._directory)
        except CheckpointError:
            self.discard(staged)
            raise
        self._prune(target)
        return target

    def discard(self, staged: Path) -> None:
        """Remove a staged directory; nothing happens if it is gone."""
        shutil.rmtree(staged, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what writers that were killed left staged. For the start of a run, when nobody is
        writing.
        """
        for path in self._directory.glob(f"{_STAGED}*"):
            self.discard(path)

    def list(self) -> Sequence[Mapping[str, object]]:
        """Name, version, env_steps, bytes and creation time of each, newest first. Sizes are looked
        at, hashes not.
        """
        return tuple(
            {
                "name": path.name,
                "version": manifest["version"],
                "env_steps": manifest.get("env_steps", 0),
                "bytes": manifest["state"]["nbytes"],
                "created": manifest["created"],
            }
            for path in self._paths()
            for manifest in _whole(path)
        )

    def last_lineage(self) -> int:
        """The newest lineage of which anything lies here, whole or not; 0 if nothing does."""
        return max(
            (
                version.lineage
                for path in self._paths()
                if (version := _version_of(path)) is not None
            ),
            default=0,
        )

    def newest(self) -> Checkpoint | None:
        """The newest one that is whole; those that are not are skipped with a warning. None if
        there is none.
        """
        for path in self._paths():
            try:
                return self.load(path)
            except CheckpointError as error:
                _log.warning(
                    "a checkpoint is skipped, the one before it is used",
                    checkpoint=str(path),
                    reason=str(error),
                )
        return None

    @staticmethod
    def load(path: Path) -> Checkpoint:
        """Check a checkpoint; its arrays are read by `Checkpoint.read`.

        Raises:
            CheckpointError: it is missing, torn, corrupt, or of another format.
        """
        manifest = _read_manifest(path)
        _verify(path / STATE, StateFile(manifest["state"]["sha256"], manifest["state"]["nbytes"]))
        return Checkpoint(path, Version(*manifest["version"]), manifest)

    def _paths(self) -> Sequence[Path]:
        """Everything that has a checkpoint's name, newest version first."""
        found = [(_version_of(path), path) for path in self._directory.glob("v*-*")]
        return [
            path
            for _, path in sorted(
                ((version, path) for version, path in found if version is not None), reverse=True
            )
        ]

    def _prune(self, published: Path) -> None:
        """Delete what is older than the newest ``keep`` whole ones, but never what was published
        just now.
        """
        kept = 0
        for path in self._paths():
            if kept >= self._keep and path != published:
                try:
                    doomed = path.rename(
                        self._directory / f"{_STAGED}{secrets.token_hex(8)}"
                    )  # a kill amid this tears nothing
                    shutil.rmtree(doomed)
                except OSError as error:
                    _log.warning(
                        "an old checkpoint stays, it cannot be deleted",
                        checkpoint=str(path),
                        reason=str(error),
                    )
            kept += sum(1 for _ in _whole(path))


def resolve(source: str, runs_dir: Path) -> Path:
    """The checkpoint that ``source`` means: a run's name or directory, its checkpoints directory,
    or a checkpoint itself.

    Raises:
        CheckpointError: there is nothing of that name, or no whole checkpoint in it; lists what
            there is.
    """
    for path in (Path(source), runs_dir / source):
        if _version_of(path) is not None and path.is_dir():
            return path
        if (path / MANIFEST).is_file():  # one that was copied to another name
            return path
        for directory in (path / "checkpoints", path):
            if directory.name == "checkpoints" and directory.is_dir():
                newest = CheckpointStore(directory, keep=1).newest()
                if newest is None:
                    raise CheckpointError(
                        f"no whole checkpoint in {str(directory)!r}; there "
                        f"{_listing(directory, 'v*-*')}"
                    )
                return newest.path
    parent = Path(source).parent
    if parent.name == "checkpoints" and parent.is_dir():
        raise CheckpointError(f"no checkpoint {source!r}; there {_listing(parent, 'v*-*')}")
    for path in (Path(source), runs_dir / source):
        if (path / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"run {path.name!r} has written no checkpoint; its settings are in "
                f"{str(path / CONFIG_FILE)!r}"
            )
    runs = tuple(sorted(path.parent.name for path in runs_dir.glob("*/checkpoints")))
    close = plugins.nearest(source, runs)
    hint = f"; did you mean {close!r}?" if close else ""
    raise CheckpointError(
        f"no run or checkpoint {source!r}; runs with checkpoints in {str(runs_dir)!r}: "
        f"{', '.join(runs) or 'none'}{hint}"
    )


def _listing(directory: Path, pattern: str) -> str:
    found = sorted((path.name for path in directory.glob(pattern)), reverse=True)
    return f"are {', '.join(found)}" if found else "is nothing"


def _version_of(path: Path) -> Version | None:
    match = _NAME.fullmatch(path.name)
    return None if match is None else Version(int(match[1]), int(match[2]))


def _serialized(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    for name, array in arrays.items():
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            first = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
            raise CheckpointError(
                f"{name!r} is not finite, first at {first}: what is not finite is never "
                "checkpointed"
            )
    try:
        return safetensors.numpy.save(
            {name: np.asarray(array, order="C") for name, array in arrays.items()}
        )
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        dtypes = ", ".join(sorted({str(array.dtype) for array in arrays.values()}))
        raise CheckpointError(
            f"arrays of these dtypes cannot be written: {dtypes} ({error})"
        ) from error


def _described(version: Version, state: StateFile, manifest: Mapping[str, object]) -> bytes:
    created = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    file = {"sha256": state.sha256, "nbytes": state.nbytes}
    try:
        own = {"format": FORMAT, "version": list(version), "created": created, "state": file}
        return json.dumps({**own, **manifest}, indent=1, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest cannot be written as strict JSON: {error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    with _as_checkpoint_errors(path):
        try:
            return _checked(
                path, json.loads((path / MANIFEST).read_bytes(), parse_constant=_refuse_constant)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the manifest of {str(path)!r} is corrupt: {error!r}") from error


def _checked(path: Path, manifest: Any) -> dict[str, Any]:
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{str(path)!r} has format {manifest['format']!r}, read is {FORMAT}: use the version "
            "of tianflow that wrote it"
        )
    lineage, number = manifest["version"]
    values = (
        manifest,
        lineage,
        number,
        manifest["state"]["sha256"],
        manifest["state"]["nbytes"],
        manifest["created"],
    )
    for value, kind in zip(values, (dict, int, int, str, int, str), strict=True):
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} should be of type {kind.__name__}")
    return dict(manifest)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _whole(path: Path) -> Iterator[dict[str, Any]]:
    """The manifest, if there is one and the state has the size that it says."""
    with contextlib.suppress(CheckpointError, OSError):
        manifest = _read_manifest(path)
        if (path / STATE).stat().st_size == manifest["state"]["nbytes"]:
            yield manifest


def _verify(path: Path, state: StateFile) -> None:
    with _as_checkpoint_errors(path), path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != state.nbytes:
            raise CheckpointError(f"{str(path)!r} is torn: {nbytes} bytes of {state.nbytes}")
        if hashlib.file_digest(file, "sha256").hexdigest() != state.sha256:
            raise CheckpointError(f"{str(path)!r} is corrupt: its sha256 is not {state.sha256}")


def _move_into_place(staged: Path, target: Path, state: StateFile) -> None:
    if not target.exists():
        staged.rename(target)
    elif _holds(target, state):
        for file in staged.iterdir():
            if file.name not in (STATE, MANIFEST):
                file.replace(target / file.name)
        (staged / MANIFEST).replace(target / MANIFEST)  # at no moment is there nothing
        _sync_directory(target)
        shutil.rmtree(staged, ignore_errors=True)
    else:
        aside = target.rename(staged.with_name(f"{_STAGED}{secrets.token_hex(8)}"))
        staged.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def _holds(path: Path, state: StateFile) -> bool:
    try:
        _verify(path / STATE, state)
    except CheckpointError:
        return False
    return True


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _as_checkpoint_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{str(error.filename or path)!r}: {error.strerror or error}"
        ) from error
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
