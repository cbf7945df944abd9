"""Checkpoints that are given up on the way leave nothing staged."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tianflow.keeper import Keeper


def staged_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".tmp")]


@pytest.mark.parametrize("when", ["waiting for the disk", "staging", "the learner has it"])
async def test_a_checkpoint_that_is_cancelled_leaves_nothing_staged(tmp_path: Path, when: str) -> None:
    disk, goes_on, asked = ThreadPoolExecutor(1), threading.Event(), asyncio.Event()

    class Learner:
        async def save(self, _staged: Path) -> Any:
            asked.set()
            await asyncio.Event().wait()

    learner: Any = Learner()
    keeper = Keeper(directory=tmp_path, keep=2, disk=disk, resumed=None, learner=lambda: learner, manifest=lambda _: {}, keep_replay=None)
    stage, staging = keeper._store.stage, threading.Event()

    def staged() -> Path:
        path = stage()
        staging.set()
        goes_on.wait()
        return path

    keeper._store.stage = staged  # type: ignore[method-assign]
    busy = disk.submit(goes_on.wait) if when == "waiting for the disk" else None
    saving = asyncio.create_task(keeper.save())
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
