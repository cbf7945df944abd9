"""Who has short turns, and who has not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from tianflow import loops
from tianflow.turns import ask_for_short_turns


def in_a_thread(work: Callable[[], object]) -> list[object]:
    """What ``work`` gives in a thread of its own, whose turns are nobody else's."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


def chosen() -> bool:
    """Whether this thread asked: what is started from it is set back to ordinary turns."""
    return bool(os.sched_getscheduler(0) & os.SCHED_RESET_ON_FORK)


def test_who_asks_is_heard_and_whom_it_starts_has_ordinary_turns() -> None:
    def work() -> object:
        return ask_for_short_turns(), chosen(), in_a_thread(chosen)

    assert [(True, True, [False])] == in_a_thread(work)


def test_a_loop_asks() -> None:
    async def main() -> bool:
        return chosen()

    assert [True] == in_a_thread(lambda: loops.run(main()))


def test_its_priority_stays_as_it_is() -> None:
    def work() -> object:
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        ask_for_short_turns()
        return before == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert [True] == in_a_thread(work)


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_where_there_is_no_such_thing_nothing_happens(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr("tianflow.turns.platform.system", lambda: system)
    monkeypatch.setattr("tianflow.turns.platform.machine", lambda: machine)
    assert [(False, False)] == in_a_thread(lambda: (ask_for_short_turns(), chosen()))


def test_who_has_chosen_another_policy_keeps_it() -> None:
    def work() -> object:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return ask_for_short_turns(), os.sched_getscheduler(0)

    assert [(False, os.SCHED_BATCH)] == in_a_thread(work)
