"""Keeping: checkpoints of a run, where a learner goes on from, and how often writing one failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, cast

from tianflow.core.payloads import NO_VERSION, SavedState, StateFile, Version
from tianflow.core.statistics import CheckpointStatistics, HistogramBuilder
from tianflow.errors import BrokenChannelError, CheckpointError
from tianflow.logs import logger
from tianflow.rundir.checkpoints import Checkpoint, CheckpointStore

log = logger("keeper")


class LearnerPort(Protocol):
    """The way to the learner, wherever it runs."""

    async def save(self, staged: Path) -> SavedState:
        """Write the whole state, as of the next boundary, into ``staged``."""

    async def rest(self) -> Version:
        """Publish the newest version, once the learner is at a boundary; it is held there."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a resumed run goes on from: counts, and the version of its checkpoint."""

    env_steps: int = 0
    episodes: int = 0
    elapsed_s: float = 0.0
    trained_s: float = 0.0
    version: Version = NO_VERSION

    @classmethod
    def of(cls, checkpoint: Checkpoint | None) -> Self:
        """Those of ``checkpoint``; zeros without one."""
        if checkpoint is None:
            return cls()
        manifest = checkpoint.manifest
        elapsed = float(manifest["elapsed_s"])
        # checkpoints of before this was kept apart: all of the time counts
        trained = float(manifest.get("trained_s", elapsed))
        return cls(
            int(manifest["env_steps"]),
            int(manifest["episodes"]),
            elapsed,
            trained,
            checkpoint.version,
        )


class CheckpointManager:
    """Writes checkpoints, one at a time, and knows where a learner that starts now begins.

    Args:
        directory: of the run.
        keep: how many checkpoints stay.
        disk: what blocks on the disk runs here.
        resumed: the checkpoint that the run goes on from.
        learner: the way to a learner that works, or None.
        manifest: what goes into the manifest beside a saved state.
        keep_replay: writes what is in replay into a directory, and says which files that took;
            None: it is not kept.
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
        keep_replay: Callable[[Path], Awaitable[Mapping[str, StateFile]]] | None = None,
    ) -> None:
        self._store = CheckpointStore(directory / "checkpoints", keep=keep)
        self._disk, self._resumed, self._learner, self._manifest = disk, resumed, learner, manifest
        self._lineage = resumed.version.lineage if resumed else 0
        self._writing = asyncio.Lock()
        self._asked = self._written = False
        self._seconds = HistogramBuilder()
        self.statistics = CheckpointStatistics()
        self._keep_replay = keep_replay
        self.listing: Sequence[Mapping[str, object]] = ()
        """Checkpoints on disk, newest first, as of the last one written."""

    @property
    def resumed(self) -> Path | None:
        """The checkpoint that the run goes on from."""
        return None if self._resumed is None else self._resumed.path

    @property
    def busy(self) -> bool:
        """True while one is being written, or waits for the learner's next boundary."""
        return self._writing.locked()

    @property
    def kept(self) -> int | None:
        """Updates in the newest checkpoint on disk, as of the last one written; None: there is
        none.
        """
        return None if not self.listing else cast("tuple[int, int]", self.listing[0]["version"])[1]

    async def open(self) -> None:
        """Sweep away what a crashed writer left, and look at what is there."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._disk, self._store.sweep)
        self.listing = await loop.run_in_executor(self._disk, self._store.list)

    async def next_start(self) -> tuple[Version, int, Path | None]:
        """Where a learner that starts now begins: version of a new lineage, samples trained, and
        the checkpoint, if any.

        The newest checkpoint that this process made, else the one it was resumed from.
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

    def ask(self) -> Coroutine[None, None, object] | None:
        """What writes one that somebody asked for; None while another that was asked for has not
        begun, for that one will do.

        However often people and programs ask, the last checkpoint of a run waits for two at most.
        """
        if self._asked:
            return None
        self._asked = True
        return self._save_as_asked()

    async def _save_as_asked(self) -> None:
        async with self._writing:
            self._asked = False
            await self._save()

    async def save(self) -> bool:
        """Write a checkpoint. A failure is counted and logged, and leaves the checkpoints before it
        alone; False then.
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
        self.listing = await asyncio.get_running_loop().run_in_executor(
            self._disk, self._store.list
        )
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
            manifest = dict(self._manifest(saved))
            if self._keep_replay is not None:
                files = await self._keep_replay(staged)
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
        except BaseException:  # a run that is ended at once leaves nothing half-written, either
            self._disk.submit(self._forget, staging)
            raise

    def _forget(self, staging: Future[Path]) -> None:
        """Remove what was staged, also where nobody waited for it any more; on the thread that
        staged it, so afterwards.
        """
        if not staging.cancelled() and staging.exception() is None:
            self._store.discard(staging.result())
