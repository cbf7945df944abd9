"""CheckpointManager: checkpoints of a run, and the state that a new learner starts from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from tianflow.coordinator.best_checkpoint import BestCheckpoint
from tianflow.core.payloads import NO_VERSION, SavedState, StateFile, Version
from tianflow.core.statistics import BestVersion, CheckpointStatistics, HistogramBuilder
from tianflow.errors import BrokenChannelError, CheckpointError
from tianflow.logs import logger
from tianflow.rundir.checkpoints import Checkpoint, CheckpointStore

if TYPE_CHECKING:
    from tianflow.interfaces import LearnerPort

log = logger("checkpoints")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a resumed run continues: counts, and the version of its checkpoint."""

    env_steps: int = 0
    episodes: int = 0
    elapsed_s: float = 0.0
    trained_s: float = 0.0
    version: Version = NO_VERSION

    @classmethod
    def of(cls, checkpoint: Checkpoint | None) -> Self:
        """The values of ``checkpoint``; zeros without one."""
        if checkpoint is None:
            return cls()
        manifest = checkpoint.manifest
        elapsed = float(manifest["elapsed_s"])
        # A checkpoint without "trained_s": all of its time counts.
        trained = float(manifest.get("trained_s", elapsed))
        return cls(
            int(manifest["env_steps"]),
            int(manifest["episodes"]),
            elapsed,
            trained,
            checkpoint.version,
        )


class CheckpointManager:
    """Writes checkpoints, one at a time, and knows what a learner that starts now loads.

    Args:
        directory: of the run.
        keep: number of checkpoints that stay on disk.
        disk: executor of what blocks on the disk.
        resumed: the checkpoint that the run continues.
        learner: the way to a learner that works, or None.
        manifest: makes the manifest beside a saved state.
        save_replay: writes the contents of replay into a directory, and returns the files by name;
            None: replay is not saved.
        best: the version with the best evaluation is saved, too.
        meaning: see `BestCheckpoint`.
    """

    def __init__(
        self,
        *,
        directory: Path,
        keep: int,
        disk: Executor,
        resumed: Checkpoint | None,
        learner: Callable[[], LearnerPort | None],
        manifest: Callable[[SavedState], Mapping[str, object]],
        save_replay: Callable[[Path], Awaitable[Mapping[str, StateFile]]] | None = None,
        best: bool = False,
        meaning: Callable[[object | None], object] = lambda _: None,
    ) -> None:
        self._store = CheckpointStore(directory / "checkpoints", keep=keep)
        self._disk, self._resumed, self._learner, self._manifest = disk, resumed, learner, manifest
        self._lineage = resumed.version.lineage if resumed else 0
        self._writing = asyncio.Lock()
        self._requested = self._written = False
        self._seconds = HistogramBuilder()
        self.statistics = CheckpointStatistics()
        self._save_replay = save_replay
        self.listing: Sequence[Mapping[str, object]] = ()
        """Checkpoints on disk, newest first, as of the last one written."""
        self.best = BestCheckpoint(
            wanted=best,
            store=self._store,
            disk=disk,
            manifest=manifest,
            meaning=meaning,
            changed=self._list,
        )

    @property
    def resumed(self) -> Path | None:
        """The checkpoint that the run continues."""
        return None if self._resumed is None else self._resumed.path

    @property
    def busy(self) -> bool:
        """True while a checkpoint is written, or waits for the learner's next boundary."""
        return self._writing.locked()

    @property
    def newest_updates(self) -> int | None:
        """Updates in the newest regular checkpoint on disk, as of the last one written; None
        without one.
        """
        return next(
            (
                cast("tuple[int, int]", entry["version"])[1]
                for entry in self.listing
                if entry["regular"]
            ),
            None,
        )

    async def open(self) -> None:
        """Remove the files of a crashed writer, and list the checkpoints."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._disk, self._store.sweep)
        await self.best.open()
        await self._list()

    async def _list(self) -> None:
        """Read which checkpoints there are."""
        loop, record = asyncio.get_running_loop(), self.best.record
        self.listing = await loop.run_in_executor(self._disk, self._store.list)
        best = None
        if record is not None:
            best = BestVersion(
                version=record.version.number,
                mean_return=record.mean_return,
                episodes=record.episodes,
            )
        self.statistics = replace(self.statistics, best=best)

    async def next_start(self) -> tuple[Version, int, Path | None]:
        """What a learner that starts now starts from: the version of a new lineage, samples trained
        on, and the checkpoint, if any.

        It is the newest checkpoint that this process wrote, else the one that the run continues.
        """
        loop = asyncio.get_running_loop()
        if self._written:
            found = await loop.run_in_executor(self._disk, self._store.newest)
        else:
            found = self._resumed
            self._lineage = max(
                self._lineage, await loop.run_in_executor(self._disk, self._store.last_lineage)
            )
        self._lineage += 1
        if found is None:
            return Version(self._lineage, 0), 0, None
        return (
            Version(self._lineage, found.version.number),
            int(found.manifest["samples"]),
            found.path,
        )

    def request(self) -> Coroutine[None, None, object] | None:
        """Work that writes a checkpoint; None if a requested checkpoint has not begun yet.

        However many requests come, the last checkpoint of a run waits for two at most.
        """
        if self._requested:
            return None
        self._requested = True
        return self._save_as_requested()

    async def _save_as_requested(self) -> None:
        async with self._writing:
            self._requested = False
            await self._save()

    async def save(self) -> bool:
        """Write a checkpoint. A failure is counted and logged, changes no other checkpoint, and
        returns False.
        """
        async with self._writing:
            return await self._save()

    async def _save(self) -> bool:
        learner = self._learner()
        if learner is None:
            return False
        began = time.monotonic()
        self.statistics = replace(self.statistics, attempts=self.statistics.attempts + 1)
        try:
            await self._write(learner)
        except (CheckpointError, BrokenChannelError) as error:
            log.warning("a checkpoint failed", error=str(error))
            self.statistics = replace(self.statistics, failures=self.statistics.failures + 1)
            return False
        self._written = True
        await self._list()
        self._seconds.add(time.monotonic() - began)
        self.statistics = replace(
            self.statistics, last_success=time.time(), seconds=self._seconds.read()
        )
        return True

    async def _write(self, learner: LearnerPort) -> None:
        loop, staging = asyncio.get_running_loop(), self._disk.submit(self._store.stage)
        try:
            staged = await asyncio.wrap_future(staging)
            saved = await learner.save(staged)
            manifest = {**self._manifest(saved), **self.best.entries(saved.version)}
            if self._save_replay is not None:
                files = await self._save_replay(staged)
                manifest["replay_files"] = {
                    name: {"sha256": file.sha256, "nbytes": file.nbytes}
                    for name, file in files.items()
                }
            await loop.run_in_executor(
                self._disk,
                lambda: self._store.publish(
                    staged, version=saved.version, state=saved.file, manifest=manifest
                ),
            )
            self.best.written(saved.version)
        except BaseException:  # cancelled, too: nothing half-written stays
            self._disk.submit(self._discard, staging)
            raise

    def _discard(self, staging: Future[Path]) -> None:
        """Remove the staged files. It runs on the thread that stages, so afterwards."""
        if not staging.cancelled() and staging.exception() is None:
            self._store.discard(staging.result())
