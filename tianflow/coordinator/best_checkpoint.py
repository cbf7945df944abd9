"""BestCheckpoint and Candidate: the checkpoint of the version with the highest mean return of an
evaluation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tianflow.core.payloads import SavedState, Version
from tianflow.errors import BrokenChannelError, CheckpointError
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.core.payloads import Evaluation
    from tianflow.interfaces import LearnerPort
    from tianflow.rundir.checkpoints import CheckpointStore

log = logger("checkpoints")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """The evaluation by which ``version`` is the best one."""

    version: Version
    mean_return: float
    episodes: int

    @property
    def entry(self) -> dict[str, object]:
        """It in the manifest of a checkpoint."""
        return {"mean_return": self.mean_return, "episodes": self.episodes}


class BestCheckpoint:
    """Decides which evaluated version is the best one, and sees to its checkpoint.

    The version that was evaluated is the version that is saved: a learner that trains has moved on
    by the end of an evaluation, so the state is written at its beginning (`candidate`).

    Args:
        wanted: False: no version is saved because of its evaluation.
        store: of the run's checkpoints.
        disk: executor of what blocks on the disk; one thread.
        manifest: makes the manifest beside a saved state.
        meaning: what decides about returns, under the settings in a manifest, or in force (None).
        changed: called when a checkpoint was written or marked.
    """

    def __init__(
        self,
        *,
        wanted: bool,
        store: CheckpointStore,
        disk: Executor,
        manifest: Callable[[SavedState], Mapping[str, object]],
        meaning: Callable[[object | None], object],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self.wanted = wanted
        self._store, self._disk, self._manifest = store, disk, manifest
        self._meaning, self._changed = meaning, changed
        self._compared: object = None
        """What decided about the return of `record`."""
        self.record: BestEvaluation | None = None
        """The best version with a checkpoint on disk; None before the first."""
        self._pending: BestEvaluation | None = None
        """The best version so far, whose checkpoint is still to be written."""

    async def open(self) -> None:
        """Read which version was the best one before a resume."""
        best = await asyncio.get_running_loop().run_in_executor(self._disk, self._store.best)
        if best is not None:
            found, self._compared = (
                best.manifest["best"],
                self._meaning(best.manifest.get("config")),
            )
            self.record = BestEvaluation(best.version, found["mean_return"], found["episodes"])

    def entries(self, version: Version) -> dict[str, object]:
        """Entries of the manifest of a regular checkpoint of ``version``."""
        for record in (self._pending, self.record):
            if record is not None and record.version == version:
                return {"best": {**record.entry, "only": False}}
        return {}

    def written(self, version: Version) -> None:
        """A regular checkpoint of ``version`` is on disk."""
        if self._pending is not None and self._pending.version == version:
            self.record, self._pending = self._pending, None
            self._compared = self._meaning(None)

    @contextlib.asynccontextmanager
    async def candidate(self, *, write: bool) -> AsyncIterator[Candidate]:
        """A candidate for the evaluation that follows. ``write``: it has a state of its own; else a
        regular checkpoint of the evaluated version is expected.
        """
        staged = None
        if write and self.wanted:
            try:
                staged = await self._run(self._store.stage)
            except CheckpointError as error:
                log.warning("the evaluated version will not be saved", error=str(error))
        candidate = Candidate(staged, self._manifest)
        try:
            yield candidate
        finally:
            await candidate.end()
            if staged is not None:
                self._disk.submit(self._store.discard, staged)

    async def consider(self, evaluation: Evaluation, candidate: Candidate) -> None:
        """Make the version of ``evaluation`` the best one if its mean return is the highest. Under
        other settings of the evaluation, earlier returns mean something else and do not count.
        """
        meaning = self._meaning(None)
        exceeded = (
            self.record is None
            or meaning != self._compared
            or evaluation.mean_return > self.record.mean_return
        )
        if not self.wanted or not exceeded:
            return
        record = BestEvaluation(evaluation.version, evaluation.mean_return, len(evaluation.returns))
        try:
            if await self._save(record, candidate):
                self.record, self._pending, self._compared = record, None, meaning
                await self._changed()
            else:
                self._pending = record
        except (CheckpointError, BrokenChannelError) as error:
            log.warning("the best version so far is not saved", error=str(error))

    async def _save(self, record: BestEvaluation, candidate: Candidate) -> bool:
        """False if there is no state of this version yet."""
        state = await candidate.state()
        if state is None or state[1].version != record.version:
            marked = await self._run(lambda: self._store.mark_best(record.version, record.entry))
            return marked is not None
        staged, saved, manifest = state
        evaluation = {
            "version": record.version.number,
            "mean_return": record.mean_return,
            "episodes": record.episodes,
        }
        await self._run(
            lambda: self._store.publish_best(
                staged,
                version=saved.version,
                state=saved.file,
                manifest={**manifest, "evaluation": evaluation},
                best=record.entry,
            )
        )
        return True

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


class Candidate:
    """The state of a version that is being evaluated, in a staged directory.

    Args:
        staged: the directory; None: no state is written.
        manifest: makes the manifest beside the state.
    """

    def __init__(
        self, staged: Path | None, manifest: Callable[[SavedState], Mapping[str, object]]
    ) -> None:
        self._staged, self._manifest = staged, manifest
        self._writing: asyncio.Task[tuple[SavedState, Mapping[str, object]]] | None = None

    @property
    def writes(self) -> bool:
        """True if it has a state of its own."""
        return self._staged is not None

    async def begin(self, learner: LearnerPort) -> None:
        """Request the state of a ``learner`` that rests. It is of the version at which the learner
        rests, also if the learner is released afterwards.
        """
        if self._staged is not None:
            self._writing = asyncio.create_task(self._write(learner, self._staged))
            await asyncio.sleep(0)  # the request is sent before a release can be

    async def state(self) -> tuple[Path, SavedState, Mapping[str, object]] | None:
        """The staged directory, its state and manifest, once written; None without a state.

        Raises:
            CheckpointError, BrokenChannelError: it could not be written.
        """
        if self._staged is None or self._writing is None:
            return None
        return (self._staged, *await self._writing)

    async def end(self) -> None:
        """Give up a state that is still being written."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(
        self, learner: LearnerPort, staged: Path
    ) -> tuple[SavedState, Mapping[str, object]]:
        saved = await learner.save(staged)
        return saved, self._manifest(saved)
