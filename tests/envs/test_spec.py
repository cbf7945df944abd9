import re

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from tests.support import environments
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.envs.spec import (
    ActionCodec,
    ObservationCodec,
    UnexpectedShapeError,
    action_spec,
    given_mask,
)
from tianflow.errors import ConfigError


def destinations(codec: ObservationCodec, num_envs: int) -> dict[str, np.ndarray]:
    return {leaf.name: np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in codec.leaves}


def test_nested_spaces_become_named_leaves_in_a_fixed_order():
    expected = (
        LeafSpec("arm/joints", (3,), "float32"),
        LeafSpec("arm/mode", (), "int64", (8,)),
        LeafSpec("camera", (1, 6, 6), "uint8"),
    )
    assert expected == ObservationCodec(environments.DictEnv().observation_space).leaves
    expected = (
        LeafSpec("0", (2,), "float32"),
        LeafSpec("1", (2,), "int64", (9, 9)),
        LeafSpec("2", (3,), "int8"),
    )
    assert expected == ObservationCodec(environments.TupleEnv().observation_space).leaves


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("uint8", "uint8"),
        ("int16", "int16"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("float64", "float32"),
    ],
)
def test_dtypes_are_kept_except_float64(dtype, stored):
    assert (LeafSpec("", (4, 2), stored),) == ObservationCodec(
        spaces.Box(0, 9, (4, 2), dtype)
    ).leaves


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (spaces.Sequence(spaces.Discrete(3)), "observation space"),
        (spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), spaces.Text(5)])}), "'a/1'"),
        (spaces.Dict({"g": spaces.Graph(spaces.Discrete(2), None)}), "'g'"),
        (
            spaces.Dict({"either": spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)])}),
            "'either'",
        ),
        (spaces.Dict({"nothing": spaces.Box(0, 1, (0,))}), "'nothing'"),
        (
            spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}),
            "joined paths differ",
        ),
        (spaces.Dict({}), "at least one leaf"),
    ],
)
def test_observations_without_a_fixed_shape_are_refused_by_name(space, name):
    with pytest.raises(ConfigError, match=r"^env\.id") as caught:
        ObservationCodec(space)
    assert name in str(caught.value)


@pytest.mark.parametrize("kind", [environments.DictEnv, environments.TupleEnv])
def test_encoding_keeps_every_value_and_makes_categories_zero_based(kind):
    vector = environments.NextStepVector(3, env=kind.__name__)
    codec = ObservationCodec(vector.single_observation_space)
    stored = destinations(codec, 3)
    vector.reset(seed=0)
    codec.encode(vector.step(np.zeros(3, np.int64))[0], stored)
    values = (
        {"arm/joints": 0.5, "arm/mode": 1, "camera": 1}
        if kind is environments.DictEnv
        else {"0": 1.0, "1": [1, 1], "2": 1}
    )
    for name, value in values.items():
        np.testing.assert_array_equal(np.broadcast_to(value, stored[name].shape), stored[name])


def test_encoding_some_environments_keeps_the_others():
    codec = ObservationCodec(
        spaces.Dict({"k": spaces.Discrete(9, start=1), "x": spaces.Box(-9, 9, (2,))})
    )
    where = np.array([True, False, True])
    batched = {"k": np.array([2, 3, 4]), "x": np.arange(6.0).reshape(3, 2)}
    singles = np.array(
        [
            {"k": np.int64(2), "x": np.array([0.0, 1.0])},
            None,
            {"k": np.int64(4), "x": np.array([4.0, 5.0])},
        ],
        dtype=object,
    )
    for observation in (batched, singles):
        stored = destinations(codec, 3)
        codec.encode_where(observation, where, stored)
        np.testing.assert_array_equal([1, 0, 3], stored["k"])
        np.testing.assert_array_equal([[0, 1], [0, 0], [4, 5]], stored["x"])


def test_a_wrong_shape_is_not_broadcast():
    codec = ObservationCodec(spaces.Box(-9, 9, (2,)))
    with pytest.raises(UnexpectedShapeError, match=r"\(2,\) instead of \(3, 2\)"):
        codec.encode(np.zeros(2), destinations(codec, 3))
    with pytest.raises(UnexpectedShapeError, match=r"\(1,\) instead of \(2,\)"):
        codec.encode_where(
            np.array([np.zeros(1), None, None], dtype=object),
            np.array([True, False, False]),
            destinations(codec, 3),
        )


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(3, start=5), ActionSpec("discrete", (), "int64", (3,), (5,))),
        (
            spaces.MultiDiscrete([[2, 3], [4, 5]]),
            ActionSpec("multi_discrete", (2, 2), "int64", (2, 3, 4, 5), (0, 0, 0, 0)),
        ),
        (
            spaces.MultiBinary((2, 2)),
            ActionSpec("multi_discrete", (2, 2), "int8", (2, 2, 2, 2), (0, 0, 0, 0)),
        ),
        (
            spaces.Box(-1, 2, (1, 2), np.float64),
            ActionSpec("box", (1, 2), "float64", low=(-1.0, -1.0), high=(2.0, 2.0)),
        ),
        (
            spaces.Box(-np.inf, 2, (1,)),
            ActionSpec("box", (1,), "float32", low=(-np.inf,), high=(2.0,)),
        ),
    ],
)
def test_action_spaces_become_one_array(space, expected):
    assert expected == action_spec(space)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({"a": spaces.Discrete(2)}),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Box(0, 9, (1,), np.int64),
    ],
)
def test_other_action_spaces_are_refused(space):
    with pytest.raises(ConfigError, match=r"action space.*accepted: Discrete"):
        action_spec(space)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=5),
        spaces.Discrete(4),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, -1], [0, 7]]),
        spaces.MultiBinary((2, 3)),
        spaces.Box(-1, 2, (1, 2), np.float64),
        spaces.Box(np.array([-1, -np.inf], np.float32), np.array([np.inf, 0.5], np.float32)),
    ],
)
def test_every_decoded_action_is_in_the_batched_space(space):
    spec, rng = action_spec(space), np.random.default_rng(0)
    for _ in range(20):
        if spec.kind == "box":
            stored = rng.normal(0, 5, (4, *spec.stored_shape)).astype(np.float32)
        else:
            stored = rng.integers(spec.categories, size=(4, len(spec.categories))).reshape(
                4, *spec.stored_shape
            )
        decoded = ActionCodec(spec).decode(stored)
        assert batch_space(space, 4).contains(decoded), decoded
        assert not np.shares_memory(stored, decoded)


def test_a_box_action_inside_its_bounds_is_unchanged():
    stored = np.array([[0.25], [-0.5]], np.float32)
    np.testing.assert_array_equal(
        stored, ActionCodec(action_spec(spaces.Box(-1, 1, (1,)))).decode(stored)
    )


# What a caller gives
# --------------------------------------------------------------------------------------------------

ARM = spaces.Dict(
    {
        "arm": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3, start=5)]),
        "camera": spaces.Box(0, 255, (2, 2), np.uint8),
        "grid": spaces.MultiDiscrete([2, 4], start=[0, 10]),
        "lamps": spaces.MultiBinary(3),
    }
)
GIVEN = {
    "arm": (np.zeros(2), 6),
    "camera": np.full((2, 2), 7, np.uint8),
    "grid": np.array([1, 13]),
    "lamps": np.ones(3, np.int8),
}


def codecs() -> list[ObservationCodec]:
    """That of the space, and that of a process without the environment."""
    own = ObservationCodec(ARM)
    spec = EnvironmentSpec(
        "x", own.leaves, action_spec(spaces.Discrete(2)), 1, "next_step", source=own.source
    )
    return [own, ObservationCodec.from_spec(spec)]


@pytest.mark.parametrize("codec", codecs())
@pytest.mark.parametrize(
    "given",
    [
        GIVEN,
        {**GIVEN, "further": 3},
        {**GIVEN, "arm": [[0, 0], np.int32(6)]},
        {**GIVEN, "camera": [[7, 7], [7, 7]]},
        {**GIVEN, "lamps": np.ones(3, bool)},
    ],
)
def test_an_observation_of_a_caller_is_stored_as_one_of_the_environment(codec, given):
    arrays = destinations(codec, 1)
    codec.encode_given(given, arrays)
    assert {
        "arm/0": [[0.0, 0.0]],
        "arm/1": [1],
        "camera": [[[7, 7], [7, 7]]],
        "grid": [[1, 3]],
        "lamps": [[1, 1, 1]],
    } == {name: array.tolist() for name, array in arrays.items()}


@pytest.mark.parametrize("codec", codecs())
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"camera": None},
            "observation 'camera' is missing (uint8[2, 2]): the observation has 'arm', 'grid', ",
        ),
        (
            {"arm": (np.zeros(2),)},
            "observation 'arm/1' is missing (int64[]): observation 'arm' has '0'",
        ),
        (
            {"arm": ()},
            "observation 'arm/0' is missing (float64[2]): observation 'arm' has no parts",
        ),
        (
            {"arm": 3.0},
            "observation 'arm': expected a dict or tuple with '0', given a value of type float",
        ),
        ({"camera": np.zeros(4, np.uint8)}, "'camera': expected uint8[2, 2], given uint8[4]"),
        ({"camera": np.zeros((2, 2))}, "'camera': expected uint8[2, 2], given float64[2, 2]"),
        (
            {"camera": [[7, 7], [7, 256]]},
            "observation 'camera'[1, 1]: expected a value from 0 to 255, given 256",
        ),
        ({"arm": ([1, "2"], 6)}, "'arm/0': expected float64[2], given <U21[2]"),
        ({"arm": ([1, [2]], 6)}, "'arm/0': expected float64[2], given a list ("),
        ({"arm": ([0, 0], 8)}, "observation 'arm/1': expected a value from 5 to 7, given 8"),
        ({"arm": ([0, 0], 4)}, "observation 'arm/1': expected a value from 5 to 7, given 4"),
        ({"arm": ([0, 0], 5.0)}, "observation 'arm/1': expected int64[], given float64[]"),
        ({"grid": [1, 14]}, "observation 'grid'[1]: expected a value from 10 to 13, given 14"),
        ({"lamps": [0, 1, 300]}, "'lamps'[2]: expected a value from -128 to 127, given 300"),
        ({"arm": ([0, np.nan], 6)}, "observation 'arm/0'[1]: expected a finite number, given nan"),
    ],
)
def test_a_wrong_observation_of_a_caller_is_refused_by_its_key(codec, change, message):
    given = {name: part for name, part in {**GIVEN, **change}.items() if part is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        codec.encode_given(given, destinations(codec, 1))


@pytest.mark.parametrize("codec", codecs())
def test_the_result_of_a_reset_is_recognised_in_place_of_an_observation(codec):
    with pytest.raises(
        ValueError, match=r"has '0', '1'; pass the first of what reset\(\) returns$"
    ):
        codec.encode_given((GIVEN, {}), destinations(codec, 1))


@pytest.mark.parametrize("given", [np.zeros(5), None, {"a": np.zeros(4)}, "text", [0.0] * 3])
def test_a_wrong_observation_of_a_plain_space_is_refused(given):
    codec = ObservationCodec(spaces.Box(-1, 1, (4,), np.float32))
    with pytest.raises(ValueError, match=r"^observation: expected float32\[4\], given "):
        codec.encode_given(given, destinations(codec, 1))


SEVERAL = action_spec(spaces.MultiDiscrete([2, 3]))


@pytest.mark.parametrize(
    ("spec", "mask"),
    [
        (SEVERAL, [True, False, False, True, True]),
        (SEVERAL, np.array([1, 0, 0, 1, 1], np.int8)),
        (SEVERAL, (np.array([1.0, 0.0]), [0, 1, 1])),
        (action_spec(spaces.Discrete(5)), (np.array([1, 0, 0, 1, 1]),)),
    ],
)
def test_a_mask_of_a_caller_is_stored_flat(spec, mask):
    assert [[True, False, False, True, True]] == given_mask(spec, mask).tolist()


@pytest.mark.parametrize(
    ("spec", "mask", "message"),
    [
        (SEVERAL, np.ones(4), "mask: expected bool[5], given float64[4]"),
        (SEVERAL, [], "mask: expected bool[5], given float64[0]"),
        (SEVERAL, ["1"] * 5, "mask: expected bool[5], given <U1[5]"),
        (SEVERAL, {"a": 1}, "mask: expected bool[5], given a value of type dict"),
        (SEVERAL, (np.ones(2), np.ones(2)), "mask of choice 1: expected bool[3], given float64[2]"),
        (SEVERAL, [1, 0, 0, 0, 0], "mask: expected at least one possible action, given none"),
        (
            SEVERAL,
            (np.ones(2), np.zeros(3)),
            "mask of choice 1: expected at least one possible action, given none",
        ),
        (SEVERAL, (np.ones(2),) * 3, "mask: expected 2 arrays, one for each choice, given 3"),
        (
            action_spec(spaces.Box(-1, 1, (2,), np.float32)),
            [1, 1],
            "mask: expected None, because the actions are continuous, given [1, 1]",
        ),
    ],
)
def test_a_wrong_mask_of_a_caller_is_refused(spec, mask, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        given_mask(spec, mask)
