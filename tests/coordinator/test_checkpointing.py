"""Checkpoints that are given up on the way leave nothing staged."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tianflow.coordinator.checkpointing import CheckpointManager
from tianflow.errors import CheckpointError


def staged_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".tmp")]


@pytest.mark.parametrize("when", ["waiting for the disk", "staging", "the learner has it"])
async def test_a_checkpoint_that_is_cancelled_leaves_nothing_staged(
    tmp_path: Path, when: str
) -> None:
    disk, goes_on, asked = ThreadPoolExecutor(1), threading.Event(), asyncio.Event()

    class Learner:
        async def save(self, _staged: Path) -> Any:
            asked.set()
            await asyncio.Event().wait()

    learner: Any = Learner()
    manager = CheckpointManager(
        directory=tmp_path,
        keep=2,
        disk=disk,
        resumed=None,
        learner=lambda: learner,
        manifest=lambda _: {},
        save_replay=None,
    )
    stage, staging = manager._store.stage, threading.Event()

    def staged() -> Path:
        path = stage()
        staging.set()
        goes_on.wait()
        return path

    manager._store.stage = staged  # type: ignore[method-assign]
    busy = disk.submit(goes_on.wait) if when == "waiting for the disk" else None
    saving = asyncio.create_task(manager.save())
    await asyncio.sleep(0)
    if busy is None:
        await asyncio.to_thread(staging.wait)
    if when == "the learner has it":
        goes_on.set()
        await asked.wait()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    goes_on.set()
    await asyncio.to_thread(disk.shutdown)
    assert [] == staged_in(tmp_path)


async def test_a_checkpoint_that_is_asked_for_many_times_is_written_once_after_the_one_under_way(
    tmp_path: Path,
) -> None:
    """Else a program that asks all the time would have the last checkpoint of the run wait for
    hundreds.
    """
    disk, goes_on, begun = ThreadPoolExecutor(1), asyncio.Event(), []

    class Learner:
        async def save(self, _staged: Path) -> Any:
            begun.append(len(begun))
            await goes_on.wait()
            raise CheckpointError("it is only counted")

    learner: Any = Learner()
    manager = CheckpointManager(
        directory=tmp_path,
        keep=2,
        disk=disk,
        resumed=None,
        learner=lambda: learner,
        manifest=lambda _: {},
        save_replay=None,
    )
    under_way = asyncio.create_task(manager.save())
    asked = [
        asyncio.create_task(saving)
        for saving in [manager.request() for _ in range(100)]
        if saving is not None
    ]
    assert 1 == len(asked)
    while not begun:
        await asyncio.to_thread(lambda: None)
    goes_on.set()
    await asyncio.gather(under_way, *asked)
    assert [0, 1] == begun
    again = manager.request()
    assert again is not None, "it has begun: whoever asks now means what is learned from now on"
    await again
    assert [0, 1, 2] == begun
    await asyncio.to_thread(disk.shutdown)
