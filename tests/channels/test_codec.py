"""What goes over a link comes back the same."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianflow.channels.codec import (
    decode_batch,
    decode_event,
    decode_statistics,
    decode_trajectory,
    encode_batch,
    encode_event,
    encode_statistics,
    encode_trajectory,
)
from tianflow.core import events
from tianflow.core.payloads import Batch, Trajectory, Version
from tianflow.core.statistics import (
    ComponentStatistics,
    Histogram,
    HistogramBuilder,
    StateClock,
    TimeShares,
)
from tianflow.errors import BrokenChannelError

EVENTS = [
    cls
    for cls in vars(events).values()
    if isinstance(cls, type) and issubclass(cls, events.Event) and cls is not events.Event
]
counts = st.integers(0, 2**62)
floats = st.floats(allow_nan=False)
versions = st.builds(Version, st.integers(0, 2**31), st.integers(-1, 2**62))
trajectories = st.builds(Trajectory, counts, counts, counts, counts, versions)
distributions = st.builds(
    Histogram, st.tuples(floats, floats), st.tuples(counts, counts, counts), floats
)


def travelled(values: Any) -> Any:
    """As a link carries it."""
    return msgpack.unpackb(msgpack.packb(values), use_list=True, strict_map_key=False)


VALUES: dict[object, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63),
    int | None: st.none() | counts,
    float: floats,
    str: st.text(),
    tuple[float, ...]: st.lists(floats).map(tuple),
    tuple[int, ...]: st.lists(counts).map(tuple),
    tuple[str, ...]: st.lists(st.text()).map(tuple),
    dict[str, float]: st.dictionaries(st.text(), floats),
}


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_every_event_comes_back_the_same(data: st.DataObject, cls: type[events.Event]) -> None:
    hints = typing.get_type_hints(cls)
    event = cls(
        **{field.name: data.draw(VALUES[hints[field.name]]) for field in dataclasses.fields(cls)}
    )
    assert event == decode_event(*travelled(encode_event(event)))


def test_there_are_events_to_look_at() -> None:
    assert 6 < len(EVENTS)


@pytest.mark.parametrize(
    ("name", "values"),
    [("Unheard", []), ("Event", []), ("HostExited", ["host"]), ("HostExited", ["host", "why", 3])],
)
def test_an_event_of_another_version_is_refused_by_name(name: str, values: list[Any]) -> None:
    with pytest.raises(BrokenChannelError, match=f"does not know: '{name}'"):
        decode_event(name, values)


@given(trajectories)
def test_a_trajectory_comes_back_the_same(trajectory: Trajectory) -> None:
    assert trajectory == decode_trajectory(travelled(encode_trajectory(trajectory)))


@given(st.builds(Batch, versions, st.lists(trajectories).map(tuple)))
def test_a_batch_comes_back_the_same(batch: Batch) -> None:
    assert batch == decode_batch(travelled(encode_batch(batch)))


@given(
    st.builds(
        ComponentStatistics,
        name=st.text(),
        role=st.text(),
        host=st.text(),
        time=st.builds(TimeShares, st.dictionaries(st.text(), floats), st.text(), floats),
        generation=counts,
        counters=st.dictionaries(st.text(), floats),
        gauges=st.dictionaries(st.text(), floats),
        distributions=st.dictionaries(st.text(), distributions),
    )
)
def test_the_statistics_of_a_component_come_back_the_same(statistics: ComponentStatistics) -> None:
    assert statistics == decode_statistics(travelled(encode_statistics(statistics)))


def test_numbers_that_are_not_finite_come_back() -> None:
    clock, timed = StateClock("busy", clock=lambda: 5.0), HistogramBuilder()
    timed.add(0.3)
    sent = ComponentStatistics(
        "learner",
        "learner",
        "host",
        clock.read(),
        gauges={"kl": math.inf},
        distributions={"s": timed.read()},
    )
    assert sent == decode_statistics(travelled(encode_statistics(sent)))


def test_every_field_of_the_statistics_travels() -> None:
    assert len(dataclasses.fields(ComponentStatistics)) == len(
        encode_statistics(ComponentStatistics("", "", "", StateClock().read()))
    )
