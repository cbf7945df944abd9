"""Streams of fragments with known contents, and the expected windows, step by step in plain Python.

Every step has a unique action that identifies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tianflow.core.payloads import LeafSpec
from tianflow.replay import DrawnItems, Fragment, Shard, StepStream

Array = NDArray[Any]
Mode = Literal["next_step", "same_step"]
VECTOR, CAMERA, RANGE = (
    LeafSpec("vector", (2,), "float32"),
    LeafSpec("camera", (3, 2, 2), "uint8"),
    LeafSpec("far/range", (2, 3), "int16"),
)
LEAVES = (VECTOR, CAMERA, RANGE)
STACKS = frozenset({"camera", "far/range"})


@dataclass(slots=True)
class Step:
    action: int
    reward: float
    terminated: bool
    truncated: bool
    start: bool
    version: int
    state: float
    observation: dict[str, Array]
    following: dict[str, Array]


@dataclass(slots=True)
class Stretch:
    """Connected steps of one environment; ``closed`` once no step can follow."""

    steps: list[Step] = field(default_factory=list)
    closed: bool = False

    def windows(self, length: int, period: int) -> Iterator[list[Step]]:
        """The complete windows."""
        for begin in range(0, len(self.steps), period):
            window = self.steps[begin : begin + length]
            if len(window) == length or self.closed:
                yield window


class World:
    """N environments whose episodes end at random, in fragments of at most ``steps`` steps.

    ``odd``: share of stacks that are not a shift of the one before.
    """

    def __init__(
        self,
        *,
        environments: int,
        steps: int,
        mode: Mode,
        seed: int,
        ends: float = 0.2,
        odd: float = 0.1,
        actor: int = 0,
    ) -> None:
        self.n, self.t, self.mode, self.ends, self.odd = environments, steps, mode, ends, odd
        self.rng = np.random.default_rng(seed)
        self.stream, self.number, self.version = StepStream(actor, 0), 0, 0
        self.next_action = 1_000_000 * actor
        self.stretches: list[Stretch] = []
        self._begin()

    def _begin(self) -> None:
        self.observation = [self._first() for _ in range(self.n)]
        self.start, self.over = [True] * self.n, [False] * self.n
        self.current = [Stretch() for _ in range(self.n)]
        self.stretches += self.current

    def restart(self) -> None:
        """The actor restarts at any point."""
        for stretch in self.current:
            stretch.closed = True
        self.stream, self.number = StepStream(self.stream.actor, self.stream.incarnation + 1), 0
        self._begin()

    def lose(self) -> None:
        """One fragment is produced and never arrives."""
        known = list(self.stretches)
        for stretch in self.current:
            stretch.closed = True
        self.current = [Stretch() for _ in range(self.n)]
        self.fragment()
        self.stretches = known
        self.current = [Stretch() for _ in range(self.n)]
        self.stretches += self.current

    def fragment(self, length: int | None = None) -> Fragment:
        """The next ``length`` steps, in arrays of ``steps``; rows past the length hold values that
        must not be read.
        """
        length = self.t if length is None else length
        arrays = self._arrays()
        for k in range(length):
            arrays["version"][k] = self.version
            for i in range(self.n):
                self._step(arrays, k, i)
        for i in range(self.n):
            self._show(arrays, length, i)
        self.number += 1
        return Fragment(arrays, length, self.stream, self.number)

    def _arrays(self) -> dict[str, Array]:
        t, n = self.t, self.n
        arrays: dict[str, Array] = {
            f"obs/{leaf.name}": np.full((t + 1, n, *leaf.shape), 99, leaf.dtype) for leaf in LEAVES
        }
        if self.mode == "same_step":
            arrays |= {
                f"final_obs/{leaf.name}": np.full((t, n, *leaf.shape), 98, leaf.dtype)
                for leaf in LEAVES
            }
        arrays |= {name: np.ones((t, n), np.bool_) for name in ("terminated", "truncated", "valid")}
        arrays |= {
            "action": np.full((t, n), -1),
            "reward": np.full((t, n), np.nan, np.float32),
            "start": np.ones((t + 1, n), np.bool_),
        }
        return arrays | {
            "version": np.full(t, -1),
            "state/h": np.full((t, n, 2), np.nan, np.float32),
        }

    def _show(self, arrays: dict[str, Array], k: int, i: int) -> None:
        for leaf in LEAVES:
            arrays[f"obs/{leaf.name}"][k, i] = self.observation[i][leaf.name]
        arrays["start"][k, i] = self.start[i]

    def _step(self, arrays: dict[str, Array], k: int, i: int) -> None:
        self._show(arrays, k, i)
        arrays["action"][k, i], self.next_action = self.next_action, self.next_action + 1
        reset = self.over[i]
        terminated, truncated = (
            (False, False) if reset else (self.rng.random(2) < self.ends / 2.0).tolist()
        )
        following = self._first() if reset else self._following(self.observation[i])
        arrays["valid"][k, i], arrays["terminated"][k, i], arrays["truncated"][k, i] = (
            not reset,
            terminated,
            truncated,
        )
        arrays["reward"][k, i] = 0.0 if reset else self.rng.standard_normal()
        arrays["state/h"][k, i] = arrays["action"][k, i] % 1000
        ended = terminated or truncated
        if not reset:
            reward = float(arrays["reward"][k, i])
            step = Step(self.next_action - 1, reward, terminated, truncated, self.start[i], self.version, (self.next_action - 1) % 1000,
                        self.observation[i], following)  # fmt: skip
            self.current[i].steps.append(step)
        if ended:
            self.current[i].closed = True
            self.current[i] = Stretch()
            self.stretches.append(self.current[i])
        if self.mode == "next_step":
            self.observation[i], self.over[i], self.start[i] = following, ended, reset
        else:
            for leaf in LEAVES:
                arrays[f"final_obs/{leaf.name}"][k, i] = following[leaf.name]
            self.observation[i], self.start[i] = self._first() if ended else following, ended

    def _first(self) -> dict[str, Array]:
        """One repeated frame, as frame stacking begins an episode, or any stack."""
        whole = self._any()
        if self.rng.random() < 0.7:
            for name in STACKS:
                whole[name][:] = whole[name][-1]
        return whole

    def _any(self) -> dict[str, Array]:
        return {
            leaf.name: self.rng.integers(0, 90, leaf.shape).astype(leaf.dtype) for leaf in LEAVES
        }

    def _following(self, before: dict[str, Array]) -> dict[str, Array]:
        after = self._any()
        for name in STACKS:
            if self.rng.random() >= self.odd:
                after[name][:-1] = before[name][1:]
        return after


def everything(shard: Shard) -> tuple[DrawnItems, dict[str, Array]]:
    """All items of a first-in-first-out shard, once each."""
    out = shard.make_batch(len(shard))
    return shard.draw(len(shard), np.random.default_rng(0), out), out


def assert_window(window: list[Step], out: dict[str, Array], i: int) -> None:
    """Column ``i`` of a batch is this window, padded."""
    n, length = len(window), len(out["valid"])
    assert [True] * n + [False] * (length - n) == out["valid"][:, i].tolist()
    pad = [0] * (length - n)
    assert [step.action for step in window] + pad == out["action"][:, i].tolist()
    assert [step.reward for step in window] + pad == out["reward"][:, i].tolist()
    assert [step.terminated for step in window] + pad == out["terminated"][:, i].tolist()
    assert [step.truncated for step in window] + pad == out["truncated"][:, i].tolist()
    assert [window[0].start] + [False] * length == out["start"][:, i].tolist()
    assert min(step.version for step in window) == out["version"][i]
    assert window[0].state == out["state/h"][i, 0] == out["state/h"][i, 1]
    for leaf in LEAVES:
        observations = out[f"obs/{leaf.name}"][:, i]
        assert leaf.dtype == observations.dtype.name
        for k, step in enumerate(window):
            np.testing.assert_array_equal(step.observation[leaf.name], observations[k])
        if not window[-1].terminated:
            np.testing.assert_array_equal(window[-1].following[leaf.name], observations[n])
