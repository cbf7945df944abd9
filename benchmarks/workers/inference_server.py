"""Worker: an inference server as in a run, and a process that has a request open in every slot.

There is no environment: an answered request is followed by the next one at once. Each line of its
input is a number of seconds; it answers with a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import mmap
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

from benchmarks.lib import child
from benchmarks.lib.harness import Values
from tianflow.channels.arena import Arena, ArenaSlot, arena_nbytes
from tianflow.channels.doorbell import Doorbell
from tianflow.core.payloads import Grant, TrajectoryLayout, Version

if TYPE_CHECKING:
    from tianflow.components.inference_server import InferenceServer
    from tianflow.config.model import Config
    from tianflow.core.payloads import EnvironmentSpec
    from tianflow.interfaces import Ends

WARM_S = 0.5
"""Seconds of requests before those that count."""
LOOK_AGAIN_S = 0.1
VERSION = Version(1, 0)
SCALE = 0.02
"""Standard deviation of the weights."""


class Asker:
    """Asks for row after row in every slot of an arena.

    Args:
        arena: its slots. Their observations are filled with noise.
        bells: doorbell of the server, and of the asker.
    """

    def __init__(self, arena: Arena, bells: Sequence[Doorbell]) -> None:
        self._arena, (self._server, self._own) = arena, bells
        generator = np.random.default_rng(0)
        for slot in range(arena.slots):
            seen = arena.views(slot)["obs/"]
            seen[...] = generator.integers(0, 256, seen.shape, np.uint8)
            noise = arena.request_views(slot)["noise"]
            noise[...] = generator.standard_normal(noise.shape, np.float32)
        steps, count = arena.layout.steps, arena.slots
        # trajectories do not end together
        self._rows = [itertools.cycle([*range(k, steps), *range(k)]) for k in _spread(count, steps)]
        self._tickets = itertools.count(1)

    def turn(self, seconds: float) -> Values:
        """Ask for ``seconds``. Return observations/s, and quantiles of the seconds from a request
        to its answer.
        """
        began = time.monotonic() + WARM_S
        waits: list[float] = []
        asked = {slot: self._ask(slot) for slot in range(self._arena.slots)}
        while asked:
            self._own.wait(time.monotonic() + LOOK_AGAIN_S)
            for slot, (request, since) in list(asked.items()):
                if not request.answered():
                    continue
                now = time.monotonic()
                if began <= now < began + seconds:
                    waits.append(now - since)
                if now < began + seconds:
                    asked[slot] = self._ask(slot)
                else:
                    del asked[slot]
        middle, late = np.quantile(waits, (0.5, 0.99)).tolist() if waits else (None, None)
        return {
            "observations": len(waits) * self._arena.layout.num_envs / seconds,
            "wait_p50": middle,
            "wait_p99": late,
        }

    def _ask(self, slot: int) -> tuple[ArenaSlot, float]:
        request = self._arena.lease(Grant(next(self._tickets), slot, VERSION))
        since = time.monotonic()
        request.ask(next(self._rows[slot]), 1)
        self._server.ring()
        return request, since


def _spread(count: int, steps: int) -> list[int]:
    return [slot * steps // count for slot in range(count)]


def shared_arena(layout: TrajectoryLayout, slots: int) -> Arena:
    """Return an arena that a forked process shares."""
    buffer = np.frombuffer(mmap.mmap(-1, arena_nbytes(layout, slots)), np.uint8)
    arena = Arena(layout=layout, buffer=buffer, capacity=slots)
    arena.slots = slots
    return arena


def make_server(
    config: Config, spec: EnvironmentSpec, arena: Arena, bells: Sequence[Doorbell]
) -> InferenceServer:
    """Return the server that a host of a run builds, on ``inference.device``. Its weights never
    change.
    """
    from tianflow.channels.latest import LatestCell
    from tianflow.channels.memory import MemoryWeights
    from tianflow.core.program import ComponentSpec, HostPlan, HostSpec
    from tianflow.hosts.compute import Compute
    from tianflow.hosts.factory import Builder
    from tianflow.interfaces import LiveSettings

    def weights(nbytes: int) -> MemoryWeights:
        made, generator = MemoryWeights(), np.random.default_rng(0)
        drawn = SCALE * generator.standard_normal(nbytes // 4, np.float32)
        made.publish(VERSION, drawn.view(np.uint8))
        return made

    def fail(error: BaseException) -> None:
        raise error

    component = ComponentSpec("inference-0", "inference")
    compute = Compute(name="compute", on_orphan=fail, bell=bells[0])
    settings = LatestCell(LiveSettings(config, config.bound), 0)
    ends = SimpleNamespace(arena=arena, bells=bells, settings=settings, weights_reader=weights)
    host = HostSpec(component.name, (component,), bell=0)
    plan = HostPlan(host, spec, arena.layout, VERSION)
    built = Builder(plan=plan, ends=cast("Ends", ends), compute=compute).build(component)
    return cast("InferenceServer", built)


def serve_turns(server: InferenceServer, asker: socket.socket) -> None:
    """Pass each line of the input to the asker, and add to its answer what the server counts. End
    the process after the last line, or after an error.
    """
    try:
        answers = asker.makefile("r", encoding="ascii")
        for line in sys.stdin:
            before = server.statistics().distributions["batch_rows"]
            asker.sendall(line.encode())
            found = json.loads(answers.readline())
            after = server.statistics().distributions["batch_rows"]
            requests, batches = after.total - before.total, after.count - before.count
            child.report({**found, "batch_requests": requests / batches})
    except Exception:  # noqa: BLE001 - a boundary: the suite shows what this process has printed
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Arguments: ``CONFIG [section.key=value ...]``. ``actors.count`` is the number of requests
    that are open at any time.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    from tianflow import envs
    from tianflow.config.loading import load_config
    from tianflow.planning.layouts import trajectory_layout

    config = load_config(given.config, given.overrides)
    spec = envs.probe(config)
    arena = shared_arena(trajectory_layout(config, spec), config.actors.count)
    bells = (Doorbell.create(), Doorbell.create())
    ours, theirs = socket.socketpair()
    if not os.fork():  # before PyTorch starts threads
        ours.close()
        asker = Asker(arena, bells)
        with theirs.makefile("rw", encoding="ascii") as lines:
            while line := lines.readline():
                lines.write(json.dumps(asker.turn(float(line))) + "\n")
                lines.flush()
        os._exit(0)
    theirs.close()

    async def serve() -> None:
        server = make_server(config, spec, arena, bells)
        turns = threading.Thread(target=serve_turns, args=(server, ours), daemon=True)
        await server.run(started=turns.start)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
