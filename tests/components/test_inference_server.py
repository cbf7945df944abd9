"""When an inference server computes, what it counts, and what a failed batch costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.components.test_central_inference import config_of
from tianflow.channels.arena import ArenaSlot, SlotRequests
from tianflow.channels.doorbell import Doorbell
from tianflow.channels.latest import LatestCell
from tianflow.channels.memory import HeapSlots
from tianflow.components import inference_server
from tianflow.components.inference_server import Computing, InferenceServer
from tianflow.core.layout import ASKED_AT
from tianflow.core.payloads import Grant, Version
from tianflow.envs import probe
from tianflow.errors import RunError
from tianflow.interfaces import LiveSettings
from tianflow.planning.layouts import trajectory_layout

STEPS = 25
FIRST = Version(0, 1)


class FakeBatch:
    """Remembers its batches. It fails ``failures`` times."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        self.failures, self.error = 0, "it broke"
        self.weights = ""
        """Those that are loaded; `loads` has one entry for each batch."""
        self.loads: list[str] = []

    def answer(self, rows: Sequence[tuple[int, int]]) -> int:
        if self.failures:
            self.failures -= 1
            raise RuntimeError(self.error)
        self.batches.append(list(rows))
        self.loads.append(self.weights)
        return 8 - len(rows)


class FakeCompute:
    """What a server needs of its host's thread."""

    def __init__(self) -> None:
        self.stopping = threading.Event()


class Place:
    """A server, and the slots of four actors. The test is its compute thread."""

    def __init__(self, *, max_batch: int = 64, max_wait_s: float = 60.0) -> None:
        config = config_of("mlp", actors=4, central=True)
        inference = {"max_batch": max_batch, "max_wait_s": max_wait_s}
        config = config.model_copy(
            update={"inference": config.inference.model_copy(update=inference)}
        )
        self.slots = HeapSlots(layout=trajectory_layout(config, probe(config)), capacity=4, bells=1)
        self.slots.add_slots(4)
        self.rings = [Doorbell.create(), Doorbell.create()]
        self.batch, self.version = FakeBatch(), FIRST
        self.server = InferenceServer(
            name="inference-0",
            host="inference-0",
            requests=SlotRequests(self.slots.arena, index=0, servers=1),
            steps=STEPS,
            bells=self.rings,
            settings=LatestCell(LiveSettings(config, config.bound), 0),
            compute=FakeCompute(),  # type: ignore[arg-type]
            make=lambda: pytest.fail("made already"),
        )
        self.turns = self.server._serve(Computing(self.batch, self.load))
        self.wait = next(self.turns)
        self.leased: dict[int, ArenaSlot] = {}
        self.ticket = 0

    def load(self) -> Version:
        self.batch.weights = str(self.version)
        return self.version

    def ask(self, slot: int, row: int) -> None:
        if row == 0:
            self.ticket += 1
            self.leased[slot] = self.slots.arena.lease(Grant(self.ticket, slot, FIRST))
        self.leased[slot].ask(row, 1)

    def due(self) -> bool:
        return self.wait.is_over(time.monotonic())

    def turn(self) -> None:
        """One batch, whether it succeeds or not."""
        assert self.due()
        self.wait = next(self.turns)

    def counters(self) -> dict[str, float]:
        found: Any = self.server.statistics()
        return {**found.counters, **{k: v.count for k, v in found.distributions.items()}}


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.slots.close()


def test_a_server_waits_without_a_request(place: Place) -> None:
    assert not place.due()
    assert place.wait.until is None


def test_a_batch_begins_when_every_actor_that_could_ask_has_asked(place: Place) -> None:
    for slot in range(3):
        place.ask(slot, 0)
    place.turn()  # of nobody else it is known that it will ask
    assert [[(0, 0), (1, 0), (2, 0)]] == place.batch.batches
    for slot in (0, 2):
        place.ask(slot, 1)
        assert not place.due()
    place.ask(1, 1)
    place.turn()
    assert [(0, 1), (1, 1), (2, 1)] == sorted(place.batch.batches[-1])


def test_an_actor_whose_trajectory_is_complete_is_not_waited_for(place: Place) -> None:
    for row in range(STEPS):
        place.ask(0, row)
        if row == 0:
            place.ask(1, 0)
        else:
            place.leased[1].ask(row, 1)
        place.turn()
    place.ask(0, 0)
    assert place.due()


def test_an_absent_actor_is_not_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot in range(2):
        place.ask(slot, 0)
    place.turn()
    place.ask(0, 1)
    assert not place.due()
    monkeypatch.setattr(inference_server, "ABSENT_S", 0.0)
    assert place.due()


def test_a_full_batch_begins_and_the_longest_waiting_requests_are_first() -> None:
    place = Place(max_batch=2)
    for slot in range(3):
        place.ask(slot, 0)
        place.turn() if slot == 2 else place.due()
    assert [[(0, 0), (1, 0)]] == place.batch.batches
    for slot in range(2):
        place.leased[slot].ask(1, 1)
    place.turn()
    assert (2, 0) == place.batch.batches[-1][0]
    place.slots.close()


def test_a_request_waits_for_others_no_longer_than_the_limit() -> None:
    place = Place(max_wait_s=0.02)
    for slot in range(2):
        place.ask(slot, 0)
    place.turn()
    began = time.monotonic()
    place.ask(0, 1)
    assert not place.due()
    assert place.wait.until is not None
    assert began <= place.wait.until - 0.02 <= time.monotonic()
    assert place.wait.is_over(place.wait.until)
    place.slots.close()


def test_answers_carry_the_version_and_ring_the_host(place: Place) -> None:
    while place.rings[1]._poll.poll(0):
        place.rings[1].wait()  # the ring of the beginning
    place.version = Version(2, 7)
    place.ask(3, 0)
    place.turn()
    assert place.leased[3].answered()
    assert Version(2, 7) == place.leased[3].answer_version()
    assert place.rings[1]._poll.poll(0)


def test_a_row_is_stamped_with_the_weights_that_computed_it(place: Place) -> None:
    """Each batch has other weights than the one before and the one after."""
    for number in range(5):
        place.version = Version(1 + number // 3, number)
        place.ask(0, 0)
        place.turn()
        assert str(place.leased[0].answer_version()) == place.batch.loads[-1]
        assert str(place.version) == place.batch.loads[-1]


def test_the_wait_of_a_request_begins_when_the_actor_asks(place: Place) -> None:
    """Also while the server computes, and before a server that died was replaced."""
    place.ask(0, 0)
    began = place.leased[0].request[ASKED_AT]
    began -= 7.0  # in place: this actor asked long ago
    place.turn()
    found: Any = place.server.statistics()
    assert 7.0 <= found.distributions["wait_seconds"].total < 8.0


def test_a_request_that_waited_through_the_last_batch_does_not_wait_for_others_again(
    place: Place,
) -> None:
    for slot in range(2):
        place.ask(slot, 0)
    place.turn()
    place.ask(0, 1)
    assert not place.due()
    asked = place.leased[0].request[ASKED_AT]
    asked -= 60.0  # inference.max_wait_s
    assert place.due()


def test_requests_batches_loads_and_padding_are_counted(place: Place) -> None:
    for number in range(3):
        place.version = Version(0, number // 2)
        for slot in range(2):
            if number == 0:
                place.ask(slot, 0)
            else:
                place.leased[slot].ask(number, 1)
        place.turn()
    found = place.counters()
    assert (6, 3, 2, 18, 0) == (
        found["requests"],
        found["batch_rows"],
        found["weight_loads"],
        found["padding"],
        found["failures"],
    )
    assert 6 == found["wait_seconds"]
    assert "waiting:requests" == place.server.statistics().time.current


def test_a_failed_batch_is_computed_again(place: Place) -> None:
    place.ask(0, 0)
    place.batch.failures = 2
    place.turn()
    assert not place.leased[0].answered()
    for _ in range(2):  # the back-off, then the next batch
        while place.wait.until is not None and not place.due():
            time.sleep(0.001)
        place.wait = next(place.turns)
    while not place.due():
        time.sleep(0.001)
    place.wait = next(place.turns)
    place.turn()
    assert place.leased[0].answered()
    assert 2 == place.counters()["failures"]


def test_without_memory_on_the_device_batches_become_smaller(place: Place) -> None:
    for slot in range(4):
        place.ask(slot, 0)
    assert place.due()
    place.server._failed(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert 2 == place.server._most()
    place.server._failed(RuntimeError("CUDA out of memory"))
    assert 1 == place.server._most()
    place.server._failed(ValueError("another reason"))
    assert 1 == place.server._most()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_every_error_that_memory_is_missing_is_known(place: Place, error: Exception) -> None:
    for slot in range(4):
        place.ask(slot, 0)
    assert place.due()
    place.server._failed(error)
    assert 2 == place.server._most()


def test_batches_grow_again_once_there_is_memory(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_server, "GROW_AFTER", 3)
    place.ask(0, 0)
    assert place.due()
    place.server._failed(MemoryError())
    grown = []
    for _ in range(18):
        place.ask(0, 0)
        place.turn()
        grown.append(place.server._most())
    assert [1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 16, 32, 32, 32, 64] == grown
    place.server._failed(MemoryError())
    assert 1 == place.server._most()


def test_failures_in_a_row_end_the_run(place: Place) -> None:
    for _ in range(inference_server.MOST_FAILURES):
        place.server._failed(RuntimeError("it broke"))
    with pytest.raises(RunError, match="11 batches in a row failed, .* RuntimeError: it broke"):
        place.server._failed(RuntimeError("it broke"))


def test_a_server_stops_while_it_waits(place: Place) -> None:
    place.server._compute.stopping.set()
    assert place.due()
    with pytest.raises(StopIteration):
        next(place.turns)
