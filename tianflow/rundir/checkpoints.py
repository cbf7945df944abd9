"""Checkpoints of a run: arrays in safetensors with a JSON manifest, whole or absent.

    learner: write_state(staged) -> coordinator: publish(staged) ->
        <run>/checkpoints/v<lineage>-<number>/

A checkpoint is written into a staged directory, synced and renamed, so a named checkpoint was whole
when it was published. Later damage is found by its hash on loading.
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
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from tianflow import plugins
from tianflow.config.loading import CONFIG_FILE
from tianflow.core.payloads import StateFile, Version, WeightsTable
from tianflow.core.resource_limits import refusal
from tianflow.errors import CheckpointError
from tianflow.logs import logger
from tianflow.rundir.control_file import ControlFile
from tianflow.rundir.manifest import FORMAT, RESUMED, ManifestFormatError, check_manifest
from tianflow.rundir.parameters import encode_tables, read_parameters

LARGEST_MANIFEST = 16 * 2**20
"""Bytes of a manifest that are read at most."""
STATE, MANIFEST = "state.safetensors", "manifest.json"
BEST = "@best"
"""Ending of the name of a run that means its best checkpoint."""
_STAGED = ".tmp-"
_NAME = re.compile(r"v(\d+)-(\d{10,})")
_RESERVED = frozenset({"format", "version", "created", "state"})

_KINDS = {
    stat.S_IFLNK: "a link out of the checkpoint",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_log = logger("checkpoint")


def write_state(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    tables: Mapping[str, WeightsTable] | None = None,
) -> StateFile:
    """Write ``arrays`` into the staged directory ``path``, and sync. The learner's process calls
    it, where the arrays are.

    Args:
        path: from `CheckpointStore.stage`; removed after an error.
        arrays: any shapes; dtypes of safetensors (bool, integers, float16/32/64, complex64).
        tables: names of the parameters in ``arrays``, for `Checkpoint.parameters`.

    Raises:
        CheckpointError: an array is not finite or has another dtype, or the system refuses (for
            example on a full disk).
    """
    try:
        with _as_checkpoint_errors(path):
            data = serialized(arrays, tables or {})
            _write_synced(path / STATE, data)
            return StateFile(hashlib.sha256(data).hexdigest(), len(data))
    except CheckpointError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> StateFile:
    """Write ``arrays`` to the file ``path``, and sync. Values that are not finite are accepted,
    because replay memory may be uninitialised.

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
    """Read the arrays that `write_arrays` wrote beside the state of ``checkpoint``; None if there
    are none.

    Raises:
        CheckpointError: the file is torn or corrupt.
    """
    entry = checkpoint.manifest.get("replay_files", {}).get(name)
    if entry is None:
        return None
    path = checkpoint.path / name
    _verify(path, StateFile(entry["sha256"], entry["nbytes"]))
    with _as_checkpoint_errors(path):
        return safetensors.numpy.load_file(path)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose hash was verified on loading. ``manifest``: its JSON manifest."""

    path: Path
    version: Version
    manifest: Mapping[str, Any]

    def require_resumable(self) -> None:
        """Raise CheckpointError if the manifest lacks what a run needs to continue."""
        if missing := [name for name in RESUMED if name not in self.manifest]:
            raise CheckpointError(
                f"no run can continue from {str(self.path)!r}: its manifest lacks "
                f"{', '.join(missing)}; use another checkpoint"
            )

    def read(self) -> dict[str, NDArray[Any]]:
        """Read its arrays into new memory.

        Raises:
            CheckpointError: the file changed after it was loaded, or an array is not finite.
        """
        with _as_checkpoint_errors(self.path):
            arrays = safetensors.numpy.load_file(self.path / STATE)
        for name, array in arrays.items():
            _require_finite(self.path, name, array)
        return arrays

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Parameters, normalisers and other state that another run can start from, by name.

        Raises:
            CheckpointError: it records no names, they do not fit its arrays, or a value is not
                finite.
        """
        arrays = self.read()
        with (
            _as_checkpoint_errors(self.path),
            safetensors.safe_open(self.path / STATE, framework="np") as file,
        ):
            metadata = file.metadata()
        try:
            named = read_parameters(arrays, metadata or {})
        except ValueError as error:
            raise CheckpointError(f"{str(self.path)!r} {error}") from error
        for name, array in named.items():
            _require_finite(self.path, name, array)
        return named


class CheckpointStore:
    """The checkpoints of one run. All methods wait for the disk; call them from a thread that may
    block.

    The best checkpoint is the newest one with ``best`` in its manifest: a version gets this entry
    when its evaluation exceeds those before. A checkpoint that was written for its evaluation alone
    does not count as one of the newest, so a run continues from a regular one.

    Args:
        directory: ``<run>/checkpoints``; created when needed.
        keep: number of regular whole checkpoints that are retained, beside the best one.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(
                f"keep = {keep}: every checkpoint would be deleted at once; accepted: 1 or more"
            )
        self._directory, self._keep = directory, keep

    def stage(self) -> Path:
        """Create a directory to write a checkpoint into.

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
        """Verify a staged directory, give it its final name, and delete surplus checkpoints.

        An existing checkpoint of this version gets the new manifest. Earlier checkpoints are not
        touched before this one is safe.

        Raises:
            CheckpointError: the file does not match ``state``, the manifest is not strict JSON, or
                the system refuses. The staged directory is then removed.
            ValueError: ``manifest`` uses one of the names format, version, created, state.
        """
        if taken := _RESERVED & manifest.keys():
            raise ValueError(
                f"a manifest may not hold {', '.join(sorted(taken))}: publish writes them"
            )
        target = self._path(version)
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

    def publish_best(
        self,
        staged: Path,
        *,
        version: Version,
        state: StateFile,
        manifest: Mapping[str, object],
        best: Mapping[str, object],
    ) -> Path:
        """As `publish`, for the checkpoint of a version that is the best one: ``best`` has
        ``mean_return`` and ``episodes`` of its evaluation. A whole checkpoint of this version is
        marked instead, and ``staged`` removed.

        Raises:
            CheckpointError, ValueError: as `publish`.
        """
        marked = self.mark_best(version, best)
        if marked is None:
            entries = {**manifest, "best": {**best, "only": True}}
            return self.publish(staged, version=version, state=state, manifest=entries)
        self.discard(staged)
        return marked

    def mark_best(self, version: Version, best: Mapping[str, object]) -> Path | None:
        """Make the whole checkpoint of ``version`` the best one; None if it does not exist.

        Raises:
            CheckpointError: the system refuses. The checkpoint is then as before.
        """
        target = self._path(version)
        for manifest in _whole(target):
            entries = {**manifest, "best": {**best, "only": _only_best(manifest)}}
            staged = self.stage()
            try:
                with _as_checkpoint_errors(target):
                    _write_synced(staged / MANIFEST, _as_json(entries))
                    (staged / MANIFEST).replace(target / MANIFEST)
                    _sync_directory(target)
            finally:
                self.discard(staged)
            self._prune(target)
            return target
        return None

    def publish_data(
        self, data: bytes, *, version: Version, manifest: Mapping[str, object]
    ) -> Path:
        """Publish a checkpoint with ``data``, the contents of a state file (`serialized`).

        Raises:
            CheckpointError: as `publish`.
        """
        staged = self.stage()
        try:
            with _as_checkpoint_errors(staged):
                _write_synced(staged / STATE, data)
        except CheckpointError:
            self.discard(staged)
            raise
        state = StateFile(hashlib.sha256(data).hexdigest(), len(data))
        return self.publish(staged, version=version, state=state, manifest=manifest)

    @classmethod
    def copy(cls, checkpoint: Checkpoint, directory: Path) -> Checkpoint:
        """Copy ``checkpoint`` into ``directory``, and verify the copy.

        Raises:
            CheckpointError: a file is missing or damaged, or the system refuses.
        """
        staged = cls(directory, keep=1).stage()
        names = (STATE, MANIFEST, *checkpoint.manifest.get("replay_files", {}))
        try:
            with _as_checkpoint_errors(staged):
                for name in names:
                    with _opened(checkpoint.path / name) as file:
                        _write_synced(staged / name, file)
                _sync_directory(staged)
                target = staged.rename(directory / checkpoint.path.name)
                _sync_directory(directory)
        except CheckpointError:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return cls.load(target)

    def discard(self, staged: Path) -> None:
        """Remove a staged directory if it exists."""
        shutil.rmtree(staged, ignore_errors=True)

    def sweep(self) -> None:
        """Remove staged directories of killed writers. Called at the start of a run, before there
        are writers.
        """
        for path in self._directory.glob(f"{_STAGED}*"):
            self.discard(path)

    def list(self) -> Sequence[Mapping[str, object]]:
        """Name, version, env_steps, bytes and creation time of each checkpoint, newest first;
        whether it is the best one, and whether it is a regular one. Sizes are verified, hashes are
        not.
        """
        found = [(path, manifest) for path in self._paths() for manifest in _whole(path)]
        best = next((path for path, manifest in found if manifest.get("best")), None)
        return tuple(
            {
                "name": path.name,
                "version": manifest["version"],
                "env_steps": manifest.get("env_steps", 0),
                "bytes": manifest["state"]["nbytes"],
                "created": manifest["created"],
                "best": path == best,
                "regular": not _only_best(manifest),
            }
            for path, manifest in found
        )

    def last_lineage(self) -> int:
        """Lineage of the newest checkpoint, whole or not; 0 without checkpoints."""
        return max(
            (
                version.lineage
                for path in self._paths()
                if (version := _version_of(path)) is not None
            ),
            default=0,
        )

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; others are skipped with a warning. None without a
        whole one. One that was written for its evaluation alone counts only without others.
        """
        paths = self._paths()
        regular = [path for path in paths if not _is_only_best(path)]
        return self._first_whole([*regular, *(path for path in paths if path not in regular)])

    def best(self) -> Checkpoint | None:
        """The best checkpoint; one that is damaged is skipped with a warning. None without one."""
        return self._first_whole(
            [path for path in self._paths() for found in _whole(path) if found.get("best")]
        )

    def _first_whole(self, paths: Sequence[Path]) -> Checkpoint | None:
        for path in paths:
            try:
                return self.load(path)
            except CheckpointError as error:
                _log.warning(
                    "a checkpoint is skipped, the previous one is used",
                    checkpoint=str(path),
                    reason=str(error),
                )
        return None

    def newest_barrier(self, before: Version, every: int) -> Checkpoint | None:
        """The newest whole one whose number is a multiple of ``every`` and at most that of
        ``before``; None without such a checkpoint.
        """
        for path in self._paths():
            version = _version_of(path)
            if version is None or version > before or version.number > before.number:
                continue
            if version.number % every == 0:
                with contextlib.suppress(CheckpointError):
                    return self.load(path)
        return None

    @staticmethod
    def load(path: Path) -> Checkpoint:
        """Verify a checkpoint; `Checkpoint.read` reads its arrays.

        Raises:
            CheckpointError: it is missing, torn, corrupt, of another format, or not finite.
        """
        manifest = _read_manifest(path)
        _verify(path / STATE, StateFile(manifest["state"]["sha256"], manifest["state"]["nbytes"]))
        _check_arrays(path)
        return Checkpoint(path, Version(*manifest["version"]), manifest)

    def _path(self, version: Version) -> Path:
        return self._directory / f"v{version.lineage}-{version.number:010d}"

    def _paths(self) -> Sequence[Path]:
        """All directories with the name of a checkpoint, newest version first."""
        found = [(_version_of(path), path) for path in self._directory.glob("v*-*")]
        return [
            path
            for _, path in sorted(
                ((version, path) for version, path in found if version is not None), reverse=True
            )
        ]

    def _prune(self, published: Path) -> None:
        """Delete all but the newest ``keep`` regular checkpoints and the best one; never the one
        just published.
        """
        retained, paths = 0, self._paths()
        best = next((path for path in paths for found in _whole(path) if found.get("best")), None)
        for path in paths:
            only = _is_only_best(path)
            if (only or retained >= self._keep) and path not in (published, best):
                try:
                    surplus = path.rename(
                        self._directory / f"{_STAGED}{secrets.token_hex(8)}"
                    )  # renamed first, so that a kill leaves no torn checkpoint
                    shutil.rmtree(surplus)
                except OSError as error:
                    _log.warning(
                        "an old checkpoint cannot be deleted",
                        checkpoint=str(path),
                        reason=str(error),
                    )
            elif not only:
                retained += sum(1 for _ in _whole(path))


def resolve(source: str, runs_dir: Path, *, only_runs: bool = False) -> Path:
    """Find the checkpoint of ``source``: a run's name or directory, its checkpoints directory, or a
    checkpoint. ``only_runs``: ``source`` is relative to ``runs_dir``, nothing else is tried.

    With `BEST` at the end, ``source`` is a run, and the result its best checkpoint.

    Raises:
        CheckpointError: ``source`` does not exist, or holds no whole checkpoint; the message lists
            the alternatives.
    """
    if source.endswith(BEST):
        return _resolve_best(source.removesuffix(BEST), runs_dir, only_runs=only_runs)
    places = (runs_dir / source,) if only_runs else (Path(source), runs_dir / source)
    for path in places:
        if _version_of(path) is not None and path.is_dir():
            return path
        if (path / MANIFEST).is_file():  # a copy under another name
            return path
        for directory in (path / "checkpoints", path):
            if directory.name == "checkpoints" and directory.is_dir():
                newest = CheckpointStore(directory, keep=1).newest()
                if newest is None:
                    raise CheckpointError(
                        f"{str(directory)!r} has no whole checkpoint; "
                        f"found: {_listing(directory, 'v*-*')}{_if_active(directory.parent)}"
                    )
                return newest.path
    parent = Path(source).parent
    if parent.name == "checkpoints" and parent.is_dir():
        raise CheckpointError(
            f"checkpoint {source!r} does not exist; found: {_listing(parent, 'v*-*')}"
        )
    for path in places:
        if (path / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"run {path.name!r} has no checkpoint; its settings are in "
                f"{str(path / CONFIG_FILE)!r}{_if_active(path)}"
            )
    runs = [path.parent.name for path in runs_dir.glob("*/checkpoints")]
    heading = f"runs with checkpoints in {str(runs_dir)!r}"
    end = plugins.missing(source, runs, heading=heading)
    raise CheckpointError(f"run or checkpoint {source!r} {end}")


def _if_active(directory: Path) -> str:
    """The end of a message about a run without a checkpoint, if it may still write one. A run
    without an HTTP server is not found.
    """
    control = ControlFile.read(directory)
    active = control is not None and control.alive
    return "; the run is active, and writes a checkpoint when it stops" if active else ""


def _resolve_best(run: str, runs_dir: Path, *, only_runs: bool) -> Path:
    newest = resolve(run, runs_dir, only_runs=only_runs)
    places = (runs_dir / run,) if only_runs else (Path(run), runs_dir / run)
    if any(place.resolve() == newest.resolve() for place in places):
        raise CheckpointError(
            f"{run!r} is a checkpoint, and only a run has a best one; accepted: the name or the "
            f"directory of a run, or {run!r} without {BEST}"
        )
    best = CheckpointStore(newest.parent, keep=1).best()
    if best is None:
        raise CheckpointError(
            f"run {run!r} has no best checkpoint: no evaluation of it was saved (checkpoint.best, "
            f"evaluation.every_s); found: {_listing(newest.parent, 'v*-*')}"
        )
    return best.path


def _listing(directory: Path, pattern: str) -> str:
    found = sorted((path.name for path in directory.glob(pattern)), reverse=True)
    return ", ".join(found) or "none"


def _version_of(path: Path) -> Version | None:
    match = _NAME.fullmatch(path.name)
    return None if match is None else Version(int(match[1]), int(match[2]))


def serialized(arrays: Mapping[str, NDArray[Any]], tables: Mapping[str, WeightsTable]) -> bytes:
    """The contents of a state file.

    Raises:
        CheckpointError: an array is not finite or has another dtype.
    """
    for name, array in arrays.items():
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            first = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
            raise CheckpointError(
                f"{name!r} is not finite, first at {first}; only finite arrays can be saved"
            )
    try:
        return safetensors.numpy.save(
            {name: np.asarray(array, order="C") for name, array in arrays.items()},
            metadata=encode_tables(tables) or None,
        )
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        dtypes = ", ".join(sorted({str(array.dtype) for array in arrays.values()}))
        raise CheckpointError(f"safetensors cannot write arrays of {dtypes} ({error})") from error


def _described(version: Version, state: StateFile, manifest: Mapping[str, object]) -> bytes:
    created = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    file = {"sha256": state.sha256, "nbytes": state.nbytes}
    own = {"format": FORMAT, "version": list(version), "created": created, "state": file}
    return _as_json({**own, **manifest})


def _as_json(manifest: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(manifest, indent=1, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest cannot be written as strict JSON: {error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    with _as_checkpoint_errors(path):
        with _opened(path / MANIFEST) as file:
            data = file.read(LARGEST_MANIFEST + 1)
        if len(data) > LARGEST_MANIFEST:
            raise CheckpointError(
                f"the manifest of {str(path)!r} is corrupt: it has more than {LARGEST_MANIFEST} "
                "bytes"
            )
        try:
            return check_manifest(json.loads(data, parse_constant=_refuse_constant))
        except ManifestFormatError as error:
            raise CheckpointError(f"{str(path)!r} {error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"the manifest of {str(path)!r} is corrupt: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_only_best(path: Path) -> bool:
    """True for a whole checkpoint that was written for its evaluation alone."""
    return any(map(_only_best, _whole(path)))


def _only_best(manifest: Mapping[str, Any]) -> bool:
    return bool((manifest.get("best") or {}).get("only", False))


def _whole(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifest if it is valid and the state has the recorded size."""
    with contextlib.suppress(CheckpointError, OSError):
        manifest = _read_manifest(path)
        found = (path / STATE).lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size == manifest["state"]["nbytes"]:
            yield manifest


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """The regular file ``path`` of a checkpoint. Anything else is refused without opening it: a
    FIFO would wait for ever, a link may lead anywhere.
    """
    kind = path.lstat().st_mode
    if stat.S_ISLNK(kind) and path.resolve().parent == path.parent.resolve():
        kind = path.stat().st_mode  # beside it
    if not stat.S_ISREG(kind):
        raise CheckpointError(
            f"{str(path)!r} is {_KINDS.get(stat.S_IFMT(kind), 'not a regular file')}; accepted: a "
            "regular file in the directory of the checkpoint"
        )
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        yield file


def _check_arrays(path: Path) -> None:
    """Refuse a state that a learner could not save again. Only one array is in memory at a time."""
    with _as_checkpoint_errors(path), safetensors.safe_open(path / STATE, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            try:
                array = file.get_tensor(name)
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise CheckpointError(
                    f"{str(path)!r} cannot be read: NumPy has no array for {name!r} ({error})"
                ) from error
            _require_finite(path, name, array)


def _require_finite(path: Path, name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        first = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
        raise CheckpointError(
            f"{str(path)!r} cannot be used: {name!r} is not finite, first at {first}, so every "
            "later update would be lost; use an older checkpoint"
        )


def _verify(path: Path, state: StateFile) -> None:
    with _as_checkpoint_errors(path), _opened(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != state.nbytes:
            raise CheckpointError(f"{str(path)!r} is torn: {nbytes} bytes of {state.nbytes}")
        if hashlib.file_digest(file, "sha256").hexdigest() != state.sha256:
            raise CheckpointError(f"{str(path)!r} is corrupt: its sha256 is not {state.sha256}")


def _move_into_place(staged: Path, target: Path, state: StateFile) -> None:
    if not target.exists():
        staged.rename(target)
    elif _matches(target, state):
        for file in staged.iterdir():
            if file.name not in (STATE, MANIFEST):
                file.replace(target / file.name)
        (staged / MANIFEST).replace(target / MANIFEST)  # the checkpoint exists at every moment
        _sync_directory(target)
        shutil.rmtree(staged, ignore_errors=True)
    else:
        aside = target.rename(staged.with_name(f"{_STAGED}{secrets.token_hex(8)}"))
        staged.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def _matches(path: Path, state: StateFile) -> bool:
    try:
        _verify(path / STATE, state)
    except CheckpointError:
        return False
    return True


def _write_synced(path: Path, data: bytes | BufferedReader) -> None:
    """Write a new file. Only its owner can read it: the manifest holds the settings."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        if isinstance(data, bytes):
            file.write(data)
        else:
            shutil.copyfileobj(data, file)
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
        raise CheckpointError(refusal(error, repr(str(error.filename or path)))) from error
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
