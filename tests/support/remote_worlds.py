"""Servers of environments, and a relay between them and their clients that can delay, hang and cut.

`EchoEnv` shows whose row a result is: its observation holds the action that it was given.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tianflow.channels.keys import Keys
from tianflow.envs.server import EnvServer

ACTIONS = 1_000_000


class EchoEnv(gymnasium.Env[NDArray[np.float64], Any]):
    """The observation is (number drawn at the reset, episode, t, last action or -1).

    Episodes have ``length`` steps. The reward is t. Infos hold one value of each kind that may
    travel, in the first step of an episode only, and the options of the reset.
    """

    def __init__(self, length: int = 5, ending: str = "terminate", size: int = 4) -> None:
        self.observation_space = spaces.Box(-1.0, 1e9, (size,), np.float64)
        self.action_space = spaces.Discrete(ACTIONS)
        self.length, self.ending, self.size = length, ending, size
        self.drawn, self.episode, self.t = 0, -1, 0

    def _look(self, action: int) -> NDArray[np.float64]:
        observation = np.zeros(self.size)
        observation[:4] = self.drawn, self.episode, self.t, action
        return observation

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float64], dict[str, Any]]:
        super().reset(seed=seed)
        self.drawn = int(self.np_random.integers(ACTIONS))
        self.episode, self.t = self.episode + 1, 0
        return self._look(-1), {"options": str(options), "episode": self.episode}

    def step(self, action: Any) -> tuple[NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t >= self.length
        info: dict[str, Any] = {}
        if self.t == 1:
            info = {
                "number": 3,
                "single": np.float32(0.5),
                "flag": True,
                "array": np.arange(3, dtype=np.int16),
                "text": "words",
                "nothing": None,
                "pair": (1, "two"),
                "nested": {"deep": {"value": 2.5}},
            }
        return (
            self._look(int(action)),
            float(self.t),
            over and self.ending == "terminate",
            over and self.ending == "truncate",
            info,
        )


@contextmanager
def serving(
    make: Callable[[], gymnasium.Env[Any, Any]] = EchoEnv,
    num_envs: int = 4,
    *,
    address: str = "tcp://127.0.0.1:*",
    keys: Keys | None = None,
    heartbeat_s: float = 2.0,
) -> Iterator[EnvServer]:
    """A server in a thread of its own."""
    server = EnvServer(
        name="test",
        make=make,
        num_envs=num_envs,
        address=address,
        keys=keys,
        heartbeat_s=heartbeat_s,
    )
    thread = threading.Thread(target=server.serve, name="server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20.0)
        assert not thread.is_alive()
        server.close()


RECORDED = 2**22
"""Bytes of a recording at most."""


class Relay:
    """Passes TCP connections on to ``target``, which may change.

    Attributes:
        address: what clients connect to.
        target: ``tcp://HOST:PORT`` of the server behind it; None: connections end at once.
        jitter_s: each piece of data is delayed by a random time below this.
        recordings: what each client has sent so far.
    """

    def __init__(self, target: str | None, *, jitter_s: float = 0.0) -> None:
        self.target, self.jitter_s = target, jitter_s
        self.recordings: list[bytearray] = []
        self.address = ""
        self._chance = random.Random(0)
        self._open: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="relay")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    def cut(self) -> None:
        """End all connections, and each new one, until there is a target again."""
        self.target = None
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10.0)

    def hang(self) -> None:
        """Pass nothing on any more, in connections that stay open."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def flow(self) -> None:
        """The opposite of `hang`."""
        self._loop.call_soon_threadsafe(self._flows.set)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._flows = asyncio.Event(), asyncio.Event()
        self._flows.set()
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._stop.wait()
            await self._end()
            self._flows.set()

    async def _end(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target is None:
            writer.transport.abort()
            return
        port = int(self.target.rpartition(":")[2])
        theirs, other = await asyncio.open_connection("127.0.0.1", port)
        self._open |= {writer, other}
        self.recordings.append(bytearray())
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(
                self._pass(reader, other, self.recordings[-1]),
                self._pass(theirs, writer, bytearray()),
            )
        for end in (writer, other):
            self._open.discard(end)
            end.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, recording: bytearray
    ) -> None:
        while data := await reader.read(2**16):
            if len(recording) < RECORDED:
                recording += data
            if self.jitter_s:
                await asyncio.sleep(self._chance.random() * self.jitter_s)
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # ends the other direction, too


def rows_out_of_place(count: int, *, jitter_s: float = 0.02) -> tuple[int, int]:
    """Receive ``count`` rows of 16 sub-environments, in whatever order four servers return them.

    Returns:
        Rows that were received, and those that do not follow the row before of the same
        sub-environment, or do not hold its own action.
    """
    from tianflow.envs.remote import RemoteVectorEnv

    with ExitStack() as stack:
        servers = [stack.enter_context(serving(num_envs=4)) for _ in range(4)]
        relays = [
            stack.enter_context(Relay(server.address, jitter_s=jitter_s)) for server in servers
        ]
        vector = RemoteVectorEnv(16, [relay.address for relay in relays])
        stack.callback(vector.close)
        before, _ = vector.reset(seed=1)
        actions = np.zeros(16, np.int64)
        received = wrong = 0
        rows, over = np.arange(16), np.zeros(16, np.bool_)
        while received < count:
            actions[rows] = (actions[rows] // 16 + 1) * 16 + rows
            vector.send(actions[rows], rows)
            rows, observation, _, terminated, _, _ = vector.receive(
                at_least=min(4, count - received)
            )
            rows = rows[: count - received]
            for at, row in enumerate(rows):
                found, last = observation[at], before[row]
                expected = (
                    [last[1] + 1, 0.0, -1.0]
                    if over[row]
                    else [last[1], last[2] + 1, float(actions[row])]
                )
                wrong += expected != found[1:].tolist()
                before[row], over[row] = found, terminated[at]
            received += len(rows)
        return received, wrong
