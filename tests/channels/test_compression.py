"""Compressed arrays arrive bit for bit, in fewer bytes, and nothing malformed costs memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.channels.test_stacks import nbytes, played
from tianflow.channels.compression import LEAST_BYTES, compressed, decompressed
from tianflow.channels.frames import DTYPES, MalformedMessageError, decode, encode, pieces
from tianflow.channels.stacks import restack, unstacked


def through(found: Any, limit: int = 1 << 24) -> Any:
    return decompressed(decode(encode("x", 0, compressed(found))).body, limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2000,), (64, 3, 40)])
def test_arrays_arrive_as_they_are(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape, dtype=int)) % 3).reshape(shape).astype(dtype)
    found = through(array)
    assert (array.dtype, array.shape) == (found.dtype, found.shape)
    np.testing.assert_array_equal(array, found)


def test_an_array_with_strides_arrives_as_it_is() -> None:
    array = np.arange(30_000).reshape(100, 300)[::2, ::3]
    np.testing.assert_array_equal(array, through(array))


def test_images_of_few_values_take_a_fraction_of_the_bytes() -> None:
    screen = np.zeros((20, 4, 84, 84), np.uint8)
    screen[:, :, 40:44, 10:14] = 236
    assert nbytes(compressed({"obs/": screen})) < 0.05 * screen.nbytes


@pytest.mark.parametrize("nbytes_", [LEAST_BYTES - 1, 100_000])
def test_what_is_small_or_noise_is_sent_as_it_is(nbytes_: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, nbytes_, np.uint8)
    assert compressed(noise) is noise


def test_stacks_and_pieces_are_compressed_inside() -> None:
    stacks = played(9, 2, {(4, 1)}) // 64 * 64
    sent = unstacked(stacks)
    assert nbytes(compressed(sent)) < 0.7 * nbytes(sent)
    place = np.zeros_like(stacks)
    restack(place, through(sent))
    assert (place == stacks).all()
    parts = pieces(np.zeros((3, 20_000_000), np.uint8))
    assert [part.shape for part in parts] == [part.shape for part in through(parts, 1 << 26)]


GOOD = compressed(np.zeros((100, 100), np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "<U4"}, "not complete"),
        ({"dtype": None}, "not complete"),
        ({"lz4": b"bytes"}, "not complete"),
        ({"shape": None}, "no shape"),
        ({"shape": (-1, 100)}, "no shape"),
        ({"shape": (True, 100)}, "no shape"),
        ({"shape": (1 << 40, 1 << 40)}, "larger than their place"),
        ({"shape": (100, 101)}, "another size"),
        ({"shape": (100, 99)}, "damaged"),
        ({"lz4": np.zeros(30, np.uint8)}, "damaged|another size"),
        ({"lz4": np.zeros(0, np.uint8)}, "damaged|another size"),
    ],
)
def test_what_is_malformed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedMessageError, match=message):
        decompressed({**GOOD, **changes}, 1 << 20)


def test_all_arrays_together_are_limited() -> None:
    assert 3 == len(decompressed([GOOD] * 3, 120_000))
    with pytest.raises(MalformedMessageError, match="larger"):
        decompressed([GOOD] * 3, 119_999)


def test_a_bomb_costs_no_more_than_its_place() -> None:
    bomb = lz4.block.compress(bytes(1 << 26), store_size=False)
    assert len(bomb) < 1 << 19
    sent = {"lz4": np.frombuffer(bomb, np.uint8), "dtype": "|u1", "shape": (1000,)}
    with pytest.raises(MalformedMessageError, match="damaged"):
        decompressed(sent, 1000)


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_any_bytes_are_an_array_or_refused(data: bytes, size: int) -> None:
    sent = {"lz4": np.frombuffer(data, np.uint8), "dtype": "|u1", "shape": (size,)}
    with suppress(MalformedMessageError):
        assert (size,) == decompressed(sent, 10_000).shape
