"""Messages: every class comes back from a link as it was sent, and nothing malformed gets through."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.settings import cartpole
from tianflow.channels.codec import Codec
from tianflow.channels.messages import (
    EVENTS,
    MESSAGES,
    Begin,
    Commit,
    ComponentStarted,
    EventPublished,
    Granted,
    Handlers,
    ItemsSaved,
    PutSettings,
    SaveState,
    SetComponents,
    StartHost,
    StatisticsReported,
    Stop,
)
from tianflow.core import events
from tianflow.core.layout import make_draw_layout, make_layout
from tianflow.core.payloads import (
    ActionSpec,
    EnvironmentSpec,
    Episode,
    Grant,
    Holdings,
    LeafSpec,
    StateFile,
    Trajectory,
    Version,
)
from tianflow.core.program import ComponentSpec, HostPlan, HostSpec
from tianflow.core.statistics import ComponentStatistics, HistogramBuilder, StateClock
from tianflow.errors import BrokenChannelError
from tianflow.interfaces import LiveSettings

DISCRETE = ActionSpec("discrete", (), "int64", (3,), (1,))
BOX = ActionSpec("box", (2,), "float32", low=(-math.inf, -1.0), high=(math.inf, 1.0))
SHIPPED = [cls for cls in MESSAGES.classes if cls.__module__.startswith("tianflow.")]
PLAIN = {
    bool: st.booleans(),
    bytes: st.binary(),
    float: st.floats(allow_nan=False),
    int: st.integers(-(2**63), 2**63),
    str: st.text(),
    Path: st.text("abc/", min_size=1).map(Path),
    Any: st.none() | st.integers(0, 9) | st.text() | st.lists(st.integers(0, 9)),
}


def travelled(codec: Codec, value: object) -> Any:
    """As a link carries it."""
    packed = msgpack.packb(codec.encode(value))
    return codec.decode(msgpack.unpackb(packed, use_list=True, strict_map_key=False))


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field that is annotated so."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if annotation is events.Event:
        return st.one_of([values(cls) for cls in EVENTS.classes])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(
            [st.none() if each is types.NoneType else values(each) for each in arguments]
        )
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin in (dict, Mapping):
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    hints = get_type_hints(annotation)
    return st.builds(annotation, **{name: values(hint) for name, hint in hints.items()})


def same(sent: object, arrived: object) -> bool:
    """Equal and of one class; NamedTuples of two classes may be equal, too."""
    return sent == arrived and type(sent) is type(arrived)


# There and back
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", SHIPPED, ids=lambda cls: cls.__name__)
@examples(5)
@given(data=st.data())
def test_every_message_comes_back_the_same(data: st.DataObject, cls: type) -> None:
    sent = data.draw(values(cls))
    assert same(sent, travelled(MESSAGES, sent))


@pytest.mark.parametrize("cls", EVENTS.classes, ids=lambda cls: cls.__name__)
@examples(5)
@given(data=st.data())
def test_every_event_comes_back_the_same(data: st.DataObject, cls: type) -> None:
    sent = data.draw(values(cls))
    arrived = travelled(MESSAGES, EventPublished(7, sent))
    assert same(sent, arrived.event)


def test_there_are_messages_and_events_to_look_at() -> None:
    assert 40 < len(SHIPPED)
    every = {each for each in vars(events).values() if isinstance(each, type)}
    assert {each for each in every if each.__bases__ == (events.Event,)} == set(EVENTS.classes)


def test_every_part_of_a_message_has_its_own_class_again() -> None:
    sent = Commit("a", Trajectory(1, 2, 3, 4, Version(1, 5)), (Episode(1.0, 7),))
    arrived = travelled(MESSAGES, sent)
    assert same(sent.trajectory, arrived.trajectory)
    assert same(sent.trajectory.version, arrived.trajectory.version)
    assert same(sent.episodes, arrived.episodes)
    assert same(sent.episodes[0], arrived.episodes[0])


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
    assert (sent,) == travelled(MESSAGES, StatisticsReported((sent,))).components


@pytest.mark.parametrize("action", [DISCRETE, BOX])
def test_what_a_host_starts_with_comes_back_the_same(action: ActionSpec) -> None:
    leaves = (LeafSpec("camera", (1, 5, 5), "uint8"), LeafSpec("mode", (), "int64", (4,)))
    spec = EnvironmentSpec("Full-v0", leaves, action, 3, "same_step", frames_per_step=4)
    layout = make_layout(spec, steps=5, state_spec={"h": (7,)}, return_accumulator=True)
    draws = make_draw_layout(spec, length=5, items=11, state_spec={})
    host = HostSpec("all", (ComponentSpec("learner", "learner"),), (0, 2), 3)
    plan = HostPlan(
        host, spec, layout, Version(2, 7), 9, draws, 1, 2, Version(2, 6), Path("checkpoints/v1-7")
    )
    sent = StartHost(plan, PutSettings.of(LiveSettings(cartpole(), None), 5), "shm://")
    assert sent == travelled(MESSAGES, sent)


def test_settings_come_back_the_same() -> None:
    live = LiveSettings(cartpole(), 3, paused=True, hold_learner=True, generation=4)
    arrived = travelled(MESSAGES, PutSettings.of(live, 5))
    assert (live, 5) == (arrived.live, arrived.key)


# What is refused
# --------------------------------------------------------------------------------------------------

VERSION = [1, 2]
MALFORMED: dict[str, tuple[Any, str]] = {
    "not a list": (5, "name of a known message"),
    "an empty list": ([], "name of a known message"),
    "a name without fields": (["Begin"], "name of a known message"),
    "an unknown name": (["Unheard", [1]], "Unheard"),
    "a name that is not text": ([["Begin"], [1, VERSION]], "name of a known message"),
    "a number for the fields": (["Begin", 1], "Begin is 1"),
    "text for the fields": (["Begin", "ab"], "Begin is 'ab'"),
    "too few fields": (["Begin", [1]], "2 fields"),
    "too many fields": (["Begin", [1, VERSION, 3]], "2 fields"),
    "text for a number": (["Begin", ["1", VERSION]], "Begin.ticket is '1'"),
    "a flag for a number": (["Begin", [True, VERSION]], "Begin.ticket is True"),
    "a fraction for a number": (["Begin", [1.5, VERSION]], "Begin.ticket is 1.5"),
    "nothing for a number": (["Begin", [None, VERSION]], "Begin.ticket is None"),
    "a number for a version": (["Begin", [1, 2]], "Version is 2"),
    "text for a version": (["Begin", [1, "ab"]], "Version is 'ab'"),
    "a short version": (["Begin", [1, [2]]], "Version is [2]"),
    "a version of text": (["Begin", [1, ["1", 2]]], "Version.lineage is '1'"),
    "text among numbers": (["GiveBack", [[1, "2"]]], "GiveBack.tickets"),
    "a number for a list": (["GiveBack", [1]], "GiveBack.tickets is 1"),
    "text for a list": (["GiveBack", ["12"]], "GiveBack.tickets is '12'"),
    "a role that does not exist": (["SetComponents", [[["a", "chief", 0]]]], "ComponentSpec.role"),
    "a list for a path": (["SaveState", [1, ["a"]]], "SaveState.directory"),
    "an event that does not exist": (["EventPublished", [0, ["Event", []]]], "known event"),
    "an event with too few fields": (["EventPublished", [0, ["HostExited", ["a"]]]], "2 fields"),
    "a key that is not text": (
        ["EventPublished", [0, ["UpdateFinished", [1, 1.0, 1, {3: 1.0}]]]],
        "UpdateFinished.statistics",
    ),
    "a value that is not a number": (
        ["EventPublished", [0, ["UpdateFinished", [1, 1.0, 1, {"loss": "1"}]]]],
        "UpdateFinished.statistics",
    ),
    "a field where there is none": (["Stop", [1]], "0 fields"),
}


@pytest.mark.parametrize(("malformed", "told"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_is_one_clear_error(malformed: Any, told: str) -> None:
    with pytest.raises(BrokenChannelError) as error:
        MESSAGES.decode(malformed)
    assert told in str(error.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    ),
    st.sampled_from(SHIPPED),
)
def test_whatever_arrives_is_a_message_or_that_error(junk: Any, cls: type) -> None:
    for candidate in (junk, [cls.__name__, junk], [cls.__name__, [junk, junk]]):
        try:
            arrived = MESSAGES.decode(candidate)
        except BrokenChannelError:
            continue
        assert type(arrived) is cls
        assert same(arrived, travelled(MESSAGES, arrived))


def test_a_message_without_a_handler_is_refused_by_name() -> None:
    handlers = Handlers({Begin: lambda _: None})
    with pytest.raises(BrokenChannelError, match="ComponentStarted"):
        handlers[ComponentStarted](ComponentStarted("a"))


# Families
# --------------------------------------------------------------------------------------------------


class Note(NamedTuple):
    text: str


def test_a_new_message_is_one_class() -> None:
    codec = Codec("note")
    codec.register(Note)
    assert Note("a") == travelled(codec, Note("a"))
    with pytest.raises(BrokenChannelError, match=r"Note\.text is 3"):
        codec.decode(["Note", [3]])


def test_a_class_that_is_not_registered_is_not_sent() -> None:
    with pytest.raises(KeyError):
        Codec("note").encode(Note("a"))


def test_two_classes_of_one_name_are_refused() -> None:
    codec = Codec("note")
    codec.register(Note)
    with pytest.raises(ValueError, match="'Note'"):
        codec.register(dataclasses.make_dataclass("Note", ["text"], frozen=True))


@pytest.mark.parametrize("annotation", ["object", "int | str", "set[int]", "tuple[int, str]"])
def test_a_field_that_cannot_be_checked_is_refused_when_it_is_first_sent(annotation: str) -> None:
    cls = dataclasses.make_dataclass("Odd", [("field", annotation)], frozen=True)
    codec = Codec("note")
    codec.register(cls)
    with pytest.raises(TypeError, match="cannot be sent"):
        codec.encode(cls(1))


def test_nothing_is_sent_but_plain_values() -> None:
    sent = [
        Begin(1, Version(1, 2)),
        Granted("a", 0, Grant(1, 2, Version(1, 2))),
        SaveState(1, Path("there")),
        SetComponents((ComponentSpec("a", "actor", 1),)),
        ItemsSaved(StateFile("hash", 3), Holdings()),
        Stop(),
    ]
    allowed = (str, int, float, list, tuple, dict, type(None))

    def plain(value: Any) -> bool:
        inner = value.values() if isinstance(value, dict) else value
        deep = isinstance(value, (list, tuple, dict))
        return isinstance(value, allowed) and (not deep or all(plain(each) for each in inner))

    assert all(plain(MESSAGES.encode(each)) for each in sent)
