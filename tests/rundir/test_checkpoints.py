"""A checkpoint that counts is whole; whatever happens while one is written, those before it
stay.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.support.paths import ROOT
from tianflow.config.loading import CONFIG_FILE, load_config, write_config
from tianflow.core.payloads import StateFile, Version
from tianflow.errors import CheckpointError
from tianflow.rundir import checkpoints as checkpoint
from tianflow.rundir.checkpoints import (
    MANIFEST,
    STATE,
    CheckpointStore,
    resolve,
    write_arrays,
    write_state,
)
from tianflow.rundir.control_file import ControlFile, ProcessIdentity

ARRAYS = {
    "policy/weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "updates": np.asarray(7, dtype=np.int64),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a-run" / "checkpoints"


@pytest.fixture
def store(directory: Path) -> CheckpointStore:
    return CheckpointStore(directory, keep=3)


def save(
    store: CheckpointStore, version: Version, arrays: Mapping[str, Any] = ARRAYS, **manifest: object
) -> Path:
    staged = store.stage()
    state = write_state(staged, arrays)
    return store.publish(
        staged,
        version=version,
        state=state,
        manifest={"env_steps": version.number * 10, **manifest},
    )


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def names(store: CheckpointStore) -> list[object]:
    return [entry["name"] for entry in store.list()]


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(
    store: CheckpointStore, dtype: str, shape: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(0)
    array = generator.integers(0, 2 if dtype == "bool" else 100, size=shape).astype(dtype)
    arrays = {
        "array": array,
        "transposed": array.T,
        "big_endian": array.astype(array.dtype.newbyteorder(">")),
    }
    read = store.load(save(store, Version(1, 1), arrays)).read()
    for name, expected in arrays.items():
        assert expected.shape == read[name].shape
        assert np.dtype(dtype) == read[name].dtype
        assert np.ascontiguousarray(expected).astype(dtype).tobytes() == read[name].tobytes()
        assert read[name].flags.writeable


def test_signed_zeros_and_subnormals_are_kept(store: CheckpointStore) -> None:
    array = np.array([-0.0, 5e-324, 1.7976931348623157e308])
    assert (
        array.tobytes()
        == store.load(save(store, Version(1, 1), {"array": array})).read()["array"].tobytes()
    )


def test_the_manifest_says_what_was_published_and_is_strict_json(store: CheckpointStore) -> None:
    path = save(store, Version(2, 30), env_steps=4096, recent_returns=[1.5, 2.0])
    assert "v2-0000000030" == path.name
    assert [MANIFEST, STATE] == entries(path)
    loaded = store.load(path)
    assert Version(2, 30) == loaded.version
    assert (1, [2, 30], 4096, [1.5, 2.0]) == tuple(
        loaded.manifest[key] for key in ("format", "version", "env_steps", "recent_returns")
    )
    assert (path / STATE).stat().st_size == loaded.manifest["state"]["nbytes"]
    assert loaded.manifest["created"].endswith("+00:00")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_a_manifest_that_is_not_strict_json_is_refused_and_leaves_nothing(
    store: CheckpointStore, directory: Path, value: object
) -> None:
    with pytest.raises(CheckpointError, match="strict JSON"):
        save(store, Version(1, 1), value=value)
    assert [] == entries(directory)


def test_a_manifest_may_not_say_what_publish_says(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="created"):
        save(store, Version(1, 1), created="yesterday")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_what_is_not_finite_is_never_written(
    store: CheckpointStore, directory: Path, value: float, dtype: str
) -> None:
    array = np.zeros((2, 3), dtype)
    array[1, 2] = value
    with pytest.raises(CheckpointError, match=r"'weight' is not finite, first at \(1, 2\)"):
        save(store, Version(1, 1), {"fine": np.zeros(2), "weight": array})
    assert [] == entries(directory)


def test_a_dtype_that_cannot_be_written_is_named(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="<U3"):
        save(store, Version(1, 1), {"text": np.array(["abc"])})


def test_newer_is_the_higher_lineage_then_the_higher_number(store: CheckpointStore) -> None:
    for version in (Version(2, 5), Version(10, 1), Version(1, 12_345_678_901)):
        save(store, version)
    assert ["v10-0000000001", "v2-0000000005", "v1-12345678901"] == names(store)
    newest = store.newest()
    assert newest is not None
    assert Version(10, 1) == newest.version


def test_list_says_name_version_steps_bytes_and_time(store: CheckpointStore) -> None:
    path = save(store, Version(1, 4))
    assert {
        "name": "v1-0000000004",
        "version": [1, 4],
        "env_steps": 40,
        "bytes": (path / STATE).stat().st_size,
        "best": False,
        "regular": True,
    } == {key: value for key, value in store.list()[0].items() if key != "created"}
    json.dumps(store.list(), allow_nan=False)


def test_a_run_without_checkpoints_has_none(store: CheckpointStore) -> None:
    store.sweep()
    assert () == store.list()
    assert store.newest() is None


# Damage
# --------------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    os.truncate(path / STATE, (path / STATE).stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray((path / STATE).read_bytes())
    data[-1] ^= 1
    (path / STATE).write_bytes(data)


def _lose_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def _lose_state(path: Path) -> None:
    (path / STATE).unlink()


def _empty_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("")


def _list_as_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("[]")


def _nan_in_manifest(path: Path) -> None:
    (path / MANIFEST).write_text(
        (path / MANIFEST).read_text().replace('"env_steps": 20', '"env_steps": NaN')
    )


def _no_state_in_manifest(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "state": {"sha256": 1, "nbytes": 2}}))


def _other_format(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))


DAMAGES = [
    _truncate,
    _flip,
    _lose_manifest,
    _lose_state,
    _empty_manifest,
    _list_as_manifest,
    _nan_in_manifest,
    _no_state_in_manifest,
    _other_format,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_skipped_with_a_warning_and_the_one_before_is_used(
    store: CheckpointStore, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, Version(1, 1))
    path = save(store, Version(1, 2))
    damage(path)
    newest = store.newest()
    assert newest is not None
    assert Version(1, 1) == newest.version
    assert [(str(path), "WARNING")] == [
        (entry.__dict__["checkpoint"], entry.levelname) for entry in caplog.records
    ]
    with pytest.raises(CheckpointError):
        store.load(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_publishing_again_repairs_a_damaged_version(
    store: CheckpointStore, directory: Path, damage: Any
) -> None:
    damage(save(store, Version(1, 2)))
    path = save(store, Version(1, 2))
    assert Version(1, 2) == store.load(path).version
    assert ["v1-0000000002"] == entries(directory)


def test_publishing_a_version_again_renews_its_manifest(
    store: CheckpointStore, directory: Path
) -> None:
    path = save(store, Version(1, 2), env_steps=20)
    inode = (path / STATE).stat().st_ino
    assert path == save(store, Version(1, 2), env_steps=21)
    assert 21 == store.load(path).manifest["env_steps"]
    assert inode == (path / STATE).stat().st_ino
    assert ["v1-0000000002"] == entries(directory)


def test_a_state_that_changed_after_loading_is_an_error_of_ours(store: CheckpointStore) -> None:
    path = save(store, Version(1, 1))
    loaded = store.load(path)
    _truncate(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        loaded.read()


@pytest.mark.parametrize("told", [StateFile("0" * 64, 0), StateFile("0" * 64, 216)])
def test_a_staged_file_that_is_not_what_was_told_is_not_published(
    store: CheckpointStore, directory: Path, told: StateFile
) -> None:
    staged = store.stage()
    nbytes = write_state(staged, ARRAYS).nbytes
    with pytest.raises(CheckpointError, match="torn" if told.nbytes != nbytes else "corrupt"):
        store.publish(staged, version=Version(1, 1), state=told, manifest={})
    assert [] == entries(directory)


# Retention
# --------------------------------------------------------------------------------------------------


def test_the_newest_keep_stay(store: CheckpointStore) -> None:
    for number in range(1, 6):
        save(store, Version(1, number))
    assert ["v1-0000000005", "v1-0000000004", "v1-0000000003"] == names(store)


def test_never_more_than_keep_checkpoints_and_the_one_that_is_written_are_whole(
    store: CheckpointStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at every step of the store that changes a directory, staged ones included."""
    most = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal most
            found = function(*args, **options)
            whole = [path for path in directory.glob("v*") if list(checkpoint._whole(path))]
            staged = [path for path in directory.glob(".tmp-*") if list(checkpoint._whole(path))]
            most = max(most, len(whole) + len(staged))
            assert len(staged) <= 1
            return found

        return call

    for module, name in ((Path, "rename"), (checkpoint.shutil, "rmtree"), (os, "fsync")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    for number in range(8):
        save(store, Version(1, number))
    assert 3 + 1 == most
    assert 3 == len(store.list())


def test_a_barrier_is_found_below_a_version_and_in_its_own_past(store: CheckpointStore) -> None:
    keeping = CheckpointStore(store._directory, keep=9)
    for version in (Version(1, 5), Version(1, 10), Version(2, 7), Version(2, 9)):
        save(keeping, version)
    found = keeping.newest_barrier(Version(2, 7), 5)
    assert found is not None
    assert Version(1, 5) == found.version
    assert keeping.newest_barrier(Version(2, 4), 5) is None
    (found.path / STATE).write_bytes(b"torn")
    assert keeping.newest_barrier(Version(2, 7), 5) is None


def test_a_torn_one_does_not_take_the_place_of_a_whole_one(directory: Path) -> None:
    store = CheckpointStore(directory, keep=2)
    save(store, Version(1, 1))
    _truncate(save(store, Version(1, 2)))
    save(store, Version(1, 3))
    assert ["v1-0000000003", "v1-0000000001"] == names(store)
    save(store, Version(1, 4))
    assert ["v1-0000000003", "v1-0000000004"] == entries(directory)


def test_what_was_published_just_now_stays_whatever_its_version(directory: Path) -> None:
    store = CheckpointStore(directory, keep=1)
    _flip(save(store, Version(2, 9)))
    save(store, Version(2, 3))
    newest = store.newest()
    assert newest is not None
    assert Version(2, 3) == newest.version


def test_keeping_none_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="accepted: 1 or more"):
        CheckpointStore(directory, keep=0)


def test_sweep_removes_what_killed_writers_left_and_nothing_else(
    store: CheckpointStore, directory: Path
) -> None:
    save(store, Version(1, 1))
    (store.stage() / STATE).write_bytes(b"half")
    store.stage()
    assert 3 == len(entries(directory))
    store.sweep()
    assert ["v1-0000000001"] == entries(directory)


def test_discarding_twice_is_harmless(store: CheckpointStore, directory: Path) -> None:
    staged = store.stage()
    store.discard(staged)
    store.discard(staged)
    assert [] == entries(directory)


WRITER = """
import sys
from pathlib import Path
import numpy as np
from tianflow.rundir.checkpoints import CheckpointStore, write_state
from tianflow.core.payloads import Version

store = CheckpointStore(Path(sys.argv[1]), keep=2)
store.sweep()
found = store.newest()
number = 0 if found is None else found.version.number
while True:
    number += 1
    staged = store.stage()
    state = write_state(staged, {"number": np.full(300_000, number)})
    store.publish(staged, version=Version(1, number), state=state, manifest={})
    print(number, flush=True)
"""


@pytest.mark.e2e
def test_a_writer_that_is_killed_again_and_again_loses_nothing_that_it_had_published(
    store: CheckpointStore, directory: Path
) -> None:
    root = ROOT
    published = 0
    for attempt in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)],
            stdout=subprocess.PIPE,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        ) as writer:
            assert writer.stdout is not None
            for _ in range(2):
                published = int(writer.stdout.readline())
            time.sleep(0.003 * attempt)  # somewhere amid the next ones
            writer.send_signal(signal.SIGKILL)
            published = max([published, *map(int, writer.stdout.read().split())])
        newest = store.newest()
        assert newest is not None
        assert published <= newest.version.number
        assert np.array_equal(np.full(300_000, newest.version.number), newest.read()["number"])
        assert newest.path == directory / str(
            store.list()[0]["name"]
        )  # nothing torn had to be skipped


# A full disk
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_files() -> Iterator[None]:
    """The system refuses to let a file grow beyond 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_state_that_the_system_refuses_leaves_the_old_checkpoint_and_no_litter(
    store: CheckpointStore, directory: Path, tiny_files: None
) -> None:
    old = save(store, Version(1, 1))
    with pytest.raises(CheckpointError, match="File too large"):
        save(store, Version(1, 2), {"big": np.zeros(100_000)})
    assert ["v1-0000000001"] == entries(directory)
    assert Version(1, 1) == store.load(old).version


@pytest.mark.parametrize("moment", range(8))
def test_a_disk_that_fills_up_at_any_moment_leaves_the_old_checkpoint(
    store: CheckpointStore, directory: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that writes or syncs fails once, in the order in which they come: all but the very
    last one undo the checkpoint.
    """
    old = save(store, Version(1, 1))
    calls = iter(range(100))

    def refuse() -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in (
        (os, "fsync"),
        (checkpoint, "_write_synced"),
        (Path, "mkdir"),
        (Path, "rename"),
    ):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *args, real=real, **kwargs: (
                refuse() if next(calls) == moment else real(*args, **kwargs)
            ),
        )
    with pytest.raises(CheckpointError, match="No space left"):
        save(store, Version(1, 2))
    monkeypatch.undo()
    assert [old.name] == entries(directory)[:1]
    assert 2 >= len(entries(directory))
    newest = store.newest()
    assert newest is not None
    assert (
        Version(1, 2 if moment == 7 else 1) == newest.version
    )  # the last sync comes after the rename
    assert (moment == 7) == ((directory / "v1-0000000002").exists())


def test_an_old_one_that_cannot_be_deleted_does_not_fail_the_new_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(directory, keep=1)
    save(store, Version(1, 1))

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    save(store, Version(1, 2))
    assert ["v1-0000000002"] == names(store)
    assert ["an old checkpoint cannot be deleted"] == [
        entry.getMessage() for entry in caplog.records
    ]


# Finding
# --------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_found_by_run_directory_and_its_own_path(
    store: CheckpointStore, directory: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    first, newest = save(store, Version(1, 1)), save(store, Version(1, 2))
    assert newest == resolve("a-run", runs)
    assert newest == resolve(str(directory.parent), runs)
    assert newest == resolve(str(directory), runs)
    assert first == resolve(str(first), runs)


def test_a_run_name_is_found_beside_an_unrelated_folder_of_that_name(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(store, Version(1, 1))
    (tmp_path / "a-run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert path == resolve("a-run", tmp_path / "runs")


def test_a_checkpoint_that_was_copied_to_another_name_is_found(
    store: CheckpointStore, tmp_path: Path
) -> None:
    copy = save(store, Version(1, 1)).rename(tmp_path / "best")
    assert copy == resolve(str(copy), tmp_path / "runs")
    assert Version(1, 1) == store.load(copy).version


def test_a_damaged_newest_of_a_run_is_not_what_its_name_means(
    store: CheckpointStore, tmp_path: Path
) -> None:
    first = save(store, Version(1, 1))
    _flip(save(store, Version(1, 2)))
    assert first == resolve("a-run", tmp_path / "runs")


def test_an_unknown_run_lists_those_that_there_are(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, Version(1, 1))
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "config.toml").touch()
    with pytest.raises(CheckpointError, match="run 'young' has no checkpoint"):
        resolve("young", tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"run or checkpoint 'a-rum' does not exist \(did you mean 'a-run'\?\); runs with "
        r"checkpoints in .*: a-run$",
    ):
        resolve("a-rum", tmp_path / "runs")
    with pytest.raises(CheckpointError, match="none"):
        resolve("a-run", tmp_path / "elsewhere")


def test_an_unknown_checkpoint_lists_those_beside_it(
    store: CheckpointStore, directory: Path, tmp_path: Path
) -> None:
    save(store, Version(1, 1))
    with pytest.raises(CheckpointError, match="found: v1-0000000001"):
        resolve(str(directory / "v1-0000000009"), tmp_path / "runs")


def test_a_run_whose_checkpoints_are_all_damaged_says_so(
    store: CheckpointStore, tmp_path: Path
) -> None:
    _flip(save(store, Version(1, 1)))
    with pytest.raises(CheckpointError, match="no whole checkpoint; found: v1-0000000001"):
        resolve("a-run", tmp_path / "runs")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_that_is_active_may_still_write_its_checkpoint(
    damaged: bool, store: CheckpointStore, directory: Path, tmp_path: Path
) -> None:
    """A run that was asked to stop has none until it has stopped."""
    if damaged:
        _flip(save(store, Version(1, 1)))
    else:
        directory.parent.mkdir(parents=True)
        (directory.parent / CONFIG_FILE).write_text("", encoding="utf-8")
    active = "the run is active, and writes a checkpoint when it stops"
    me = ProcessIdentity.of(os.getpid())
    control = ControlFile(
        run="a-run",
        pid=me.pid,
        start_time=me.start_time,
        address="http://127.0.0.1:1",
        token="t",
        read_token="r",
    )
    control.write(directory.parent)
    with pytest.raises(CheckpointError, match=f"has no.* checkpoint; .*; {active}$"):
        resolve("a-run", tmp_path / "runs")
    control.remove(directory.parent)
    replace(control, start_time=1).write(directory.parent)  # left by a coordinator that was killed
    with pytest.raises(CheckpointError, match="has no.* checkpoint; ") as found:
        resolve("a-run", tmp_path / "runs")
    assert active not in str(found.value)


def test_the_module_needs_no_pytorch() -> None:
    command = "import sys, tianflow.rundir.checkpoints; raise SystemExit('torch' in sys.modules)"
    root = ROOT
    assert 0 == subprocess.run([sys.executable, "-c", command], check=False, cwd=root).returncode


def test_the_last_lineage_counts_what_is_torn_too(store: CheckpointStore) -> None:
    assert store.last_lineage() == 0
    save(store, Version(2, 1))
    torn = save(store, Version(3, 1))
    (torn / "manifest.json").unlink()
    assert store.last_lineage() == 3


# A checkpoint that somebody else made
# --------------------------------------------------------------------------------------------------


def forged(path: Path, **changes: object) -> None:
    """The manifest of ``path`` with ``changes``."""
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, **changes}))


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        ({"env_steps": "x"}, "env_steps"),
        ({"env_steps": -1}, "env_steps"),
        ({"env_steps": None}, "env_steps"),
        ({"samples": 1e30}, "samples"),
        ({"episodes": True}, "episodes"),
        ({"version": [-1, -5]}, "version.0"),
        ({"version": [10**30, 10**30]}, "version.0"),
        ({"version": [1, 2, 3]}, "version"),
        ({"elapsed_s": -1.0}, "elapsed_s"),
        ({"elapsed_s": 1e300}, "elapsed_s"),
        ({"state": {"sha256": "0" * 64, "nbytes": -1}}, "state.nbytes"),
        ({"state": {"sha256": "../x", "nbytes": 1}}, "state.sha256"),
        ({"replay_files": {"../x": {"sha256": "0" * 64, "nbytes": 1}}}, "replay_files"),
        ({"config": []}, "config"),
        ({"evaluation": {"mean_return": "high"}}, "evaluation.mean_return"),
        ({"replay": {"inserts": []}}, "replay.inserts"),
        ({"replay": {}}, "replay.inserts"),
        ({"revision": 2**60}, "revision"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused_by_entry(
    store: CheckpointStore, changes: dict[str, object], entry: str
) -> None:
    path = save(store, Version(1, 5))
    forged(path, **changes)
    with pytest.raises(CheckpointError, match=rf"is corrupt: {entry}") as refused:
        CheckpointStore.load(path)
    assert "\n" not in str(refused.value)
    assert (None, ()) == (store.newest(), store.list())


def test_a_manifest_without_end_is_not_read(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "LARGEST_MANIFEST", 1000)
    path = save(store, Version(1, 5))
    CheckpointStore.load(path)
    forged(path, run="x" * 1000)
    with pytest.raises(CheckpointError, match="more than 1000 bytes"):
        CheckpointStore.load(path)


@pytest.mark.parametrize("name", [STATE, MANIFEST])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("fifo", "is a FIFO"),
        ("link", "a link out of the checkpoint"),
        ("device", "a link out"),
        ("directory", "is a directory"),
    ],
)
def test_anything_but_a_regular_file_is_refused_without_waiting(
    store: CheckpointStore, tmp_path: Path, name: str, kind: str, text: str
) -> None:
    path = save(store, Version(1, 5))
    file = path / name
    elsewhere = file.rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to(elsewhere if kind == "link" else "/dev/zero")
    with pytest.raises(CheckpointError, match=text):
        CheckpointStore.load(path)
    assert (None, ()) == (store.newest(), store.list())


def test_a_link_beside_its_file_is_followed(store: CheckpointStore) -> None:
    path = save(store, Version(1, 5))
    (path / STATE).rename(path / "real")
    (path / STATE).symlink_to("real")
    assert 5 == CheckpointStore.load(path).version.number


def test_state_that_is_not_finite_is_refused_at_load_and_the_one_before_is_used(
    store: CheckpointStore,
) -> None:
    """With a right hash it would train, and no later checkpoint could be written."""
    save(store, Version(1, 4))
    path = save(store, Version(1, 5))
    file = write_arrays(path / STATE, {"adam/mean": np.array([0.0, np.nan], np.float32)})
    forged(path, state={"sha256": file.sha256, "nbytes": file.nbytes})
    with pytest.raises(CheckpointError, match=r"'adam/mean' is not finite, first at \(1,\)"):
        CheckpointStore.load(path)
    newest = store.newest()
    assert newest is not None
    assert 4 == newest.version.number


@pytest.mark.parametrize("lacks", ["env_steps", "samples", "episodes", "elapsed_s", "config"])
def test_a_manifest_that_lacks_what_a_resume_needs_is_named(
    store: CheckpointStore, lacks: str
) -> None:
    whole = {"samples": 1, "episodes": 1, "elapsed_s": 1.0, "config": {}}
    path = save(store, Version(1, 5), **whole)
    CheckpointStore.load(path).require_resumable()
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest[lacks]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"its manifest lacks {lacks}; use another"):
        CheckpointStore.load(path).require_resumable()


def test_settings_are_for_the_owner_only(tmp_path: Path) -> None:
    """They may hold secrets in arguments of environments and sinks."""
    config = load_config({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}})
    mask = os.umask(0)
    try:
        (tmp_path / ".config.toml").touch(mode=0o666)  # left by a killed writer
        write_config(tmp_path, config)
        found = save(CheckpointStore(tmp_path / "checkpoints", keep=1), Version(1, 1))
    finally:
        os.umask(mask)
    for file in (tmp_path / "config.toml", found / "manifest.json"):
        assert 0o600 == file.stat().st_mode & 0o777, file


# The best one
# --------------------------------------------------------------------------------------------------


def save_best(store: CheckpointStore, version: Version, mean_return: float) -> Path:
    """As for an evaluation whose version has no regular checkpoint."""
    staged = store.stage()
    state = write_state(staged, ARRAYS)
    best = {"mean_return": mean_return, "episodes": 3}
    return store.publish_best(staged, version=version, state=state, manifest={}, best=best)


def listed(store: CheckpointStore, *, which: str = "") -> list[str]:
    return [str(entry["name"]) for entry in store.list() if not which or entry[which]]


def test_the_best_one_stays_beside_the_newest_ones(directory: Path) -> None:
    store = CheckpointStore(directory, keep=2)
    save_best(store, Version(1, 5), 9.0)
    for number in range(6, 12):
        save(store, Version(1, number))
    assert ["v1-0000000011", "v1-0000000010", "v1-0000000005"] == listed(store)
    assert ["v1-0000000005"] == listed(store, which="best")
    assert ["v1-0000000011", "v1-0000000010"] == listed(store, which="regular")


def test_a_better_one_replaces_the_best_one(directory: Path) -> None:
    store = CheckpointStore(directory, keep=1)
    save(store, Version(1, 4))
    save_best(store, Version(1, 5), 9.0)
    save_best(store, Version(1, 7), 10.0)
    assert ["v1-0000000007", "v1-0000000004"] == listed(store)
    best = store.best()
    assert best is not None
    assert (Version(1, 7), {"mean_return": 10.0, "episodes": 3, "only": True}) == (
        best.version,
        best.manifest["best"],
    )


def test_a_run_continues_from_a_regular_checkpoint_although_the_best_one_is_newer(
    directory: Path,
) -> None:
    """The best one has no contents of replay, and lies at no barrier of a deterministic run."""
    store = CheckpointStore(directory, keep=3)
    save(store, Version(1, 4))
    save_best(store, Version(1, 5), 9.0)
    newest = store.newest()
    assert newest is not None
    assert Version(1, 4) == newest.version
    shutil.rmtree(directory / "v1-0000000004")
    newest = store.newest()
    assert newest is not None
    assert Version(1, 5) == newest.version


def test_a_regular_checkpoint_of_the_best_version_is_marked_and_stays_as_it_is(
    directory: Path,
) -> None:
    store = CheckpointStore(directory, keep=1)
    path = save(store, Version(1, 5), env_steps=77)
    before = (path / STATE).stat().st_mtime_ns
    assert path == save_best(store, Version(1, 5), 9.0)
    assert before == (path / STATE).stat().st_mtime_ns
    manifest = store.load(path).manifest
    assert (77, {"mean_return": 9.0, "episodes": 3, "only": False}) == (
        manifest["env_steps"],
        manifest["best"],
    )
    assert [] == [entry for entry in directory.iterdir() if entry.name.startswith(".tmp")]
    for number in range(6, 9):
        save(store, Version(1, number))
    assert ["v1-0000000008", "v1-0000000005"] == listed(store)


def test_a_version_without_a_checkpoint_cannot_be_marked(directory: Path) -> None:
    store = CheckpointStore(directory, keep=1)
    assert store.mark_best(Version(1, 5), {"mean_return": 9.0, "episodes": 3}) is None
    assert store.best() is None


def test_a_damaged_best_one_gives_way_to_the_one_before(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(directory, keep=3)
    save(store, Version(1, 4))
    store.mark_best(Version(1, 4), {"mean_return": 8.0, "episodes": 3})
    path = save_best(store, Version(1, 5), 9.0)
    data = bytearray((path / STATE).read_bytes())
    data[-1] ^= 1
    (path / STATE).write_bytes(data)
    best = store.best()
    assert best is not None
    assert Version(1, 4) == best.version
    assert "a checkpoint is skipped, the previous one is used" in caplog.text


def test_a_full_disk_leaves_the_best_one_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(directory, keep=1)
    save(store, Version(1, 4))
    save_best(store, Version(1, 5), 9.0)
    save(store, Version(1, 6))

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    staged = [store.stage(), store.stage()]
    states = [write_state(path, ARRAYS) for path in staged]
    monkeypatch.setattr(checkpoint, "_write_synced", full)
    for number in range(2):
        with pytest.raises(CheckpointError, match="No space left"):
            store.publish_best(
                staged[number],
                version=Version(1, 6 + number),
                state=states[number],
                manifest={},
                best={"mean_return": 10.0, "episodes": 3},
            )
        store.discard(staged[number])
    monkeypatch.undo()
    assert ["v1-0000000006", "v1-0000000005"] == listed(store)
    assert ["v1-0000000005"] == listed(store, which="best")
    assert [] == [entry for entry in directory.iterdir() if entry.name.startswith(".tmp")]


def test_the_best_one_of_a_run_has_a_name(directory: Path) -> None:
    store, runs = CheckpointStore(directory, keep=3), directory.parents[1]
    path = save(store, Version(1, 4))
    with pytest.raises(CheckpointError, match=r"'a-run' has no best checkpoint.*v1-0000000004"):
        resolve("a-run@best", runs)
    best = save_best(store, Version(1, 5), 9.0)
    save(store, Version(1, 6))
    for run in ("a-run", str(directory.parent), str(directory)):
        assert best == resolve(f"{run}@best", runs)
    assert best == resolve("a-run@best", runs, only_runs=True)
    with pytest.raises(CheckpointError, match="is a checkpoint, and only a run has a best one"):
        resolve(f"{path}@best", runs)
    with pytest.raises(CheckpointError, match="'another' does not exist"):
        resolve("another@best", runs)


def test_the_best_one_is_copied_into_a_branch_as_the_best_one(
    directory: Path, tmp_path: Path
) -> None:
    store = CheckpointStore(directory, keep=1)
    best = store.load(save_best(store, Version(1, 5), 9.0))
    CheckpointStore.copy(best, tmp_path / "branch")
    copied = CheckpointStore(tmp_path / "branch", keep=1).best()
    assert copied is not None
    assert best.manifest == copied.manifest
