"""Server of sub-environments: steps environments of one process for vector environments elsewhere.

    messages of clients -> EnvServer -> environments -> replies

One thread handles one message after the other. A client leases sub-environments of its own with its
first message and returns them when it leaves, or when its connection ends.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from tianflow.channels.frames import MAX_FRAME, Frame, MalformedMessageError, Message, encode
from tianflow.channels.keys import Keys
from tianflow.channels.tcp import BYE, HEARTBEAT_S, ListenerStatistics, Peer, TcpListener
from tianflow.envs.remote_protocol import (
    FAILURE,
    HELLO,
    MAX_ROWS,
    PROTOCOL,
    REFUSAL,
    RESET,
    RESULT,
    STEP,
    WELCOME,
    Array,
    Leaves,
    describe,
    part,
    require_rows,
)
from tianflow.envs.vector import failed
from tianflow.errors import ConfigError, EnvironmentFailedError, Problem
from tianflow.logs import logger

MIN_FRAME = 2 * 1024**2
"""Bytes of a frame that a server accepts at least: options of a reset may hold arrays."""
DETAILS = 16 * 1024
"""Characters of a traceback that a client gets."""
POLL_S = 1.0
"""Seconds between two looks for clients that are gone."""
CHECK_S = 5.0
"""How long after the end of a connection a server looks for the client that it belonged to: ZeroMQ
reports the end first, and removes the connection then.
"""
MAX_NESTED = 16
"""Dicts inside one another in an info; deeper ones are not sent."""
Info = dict[str, Any]
log = logger("envs.server")


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Counters of an `EnvServer`, since it began."""

    welcomed: int
    """Clients that leased sub-environments."""
    refused: int
    """Clients that did not match, or for which there was no sub-environment left."""
    abandoned: int
    """Leases of clients that ended without a word."""
    steps: int
    """Steps of sub-environments, resets included."""
    failures: int
    """Requests in which an environment raised."""
    infos_dropped: int
    """Entries of infos that could not be sent."""
    connections: ListenerStatistics


class SubEnvironment:
    """One environment of a server. After a failure it is closed, and made again by `reset`."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]]) -> None:
        self._make = make
        # NumPy has its error state there: `numpy.seterr` of an environment reaches no other code
        self._run = contextvars.copy_context().run
        self._environment: gymnasium.Env[Any, Any] | None = make()
        self.over = False
        """True if its episode has ended and nothing has reset it since."""
        self.ready = False
        """True if the client that holds it has reset it."""

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Of observations and of actions."""
        environment = self._running
        return environment.observation_space, environment.action_space

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._running.metadata

    @property
    def _running(self) -> gymnasium.Env[Any, Any]:
        if self._environment is None:
            self._environment = self._make()
        return self._environment

    def reset(self, seed: int | None, options: Info | None) -> tuple[Any, Info]:
        """Begin an episode: its first observation, and the info."""
        self.ready, self.over = False, False
        found = self._run(self._running.reset, seed=seed, options=options)
        self.ready = True
        return found

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """What the environment's own `step` returns."""
        observation, reward, terminated, truncated, info = self._run(self._running.step, action)
        self.over = bool(terminated or truncated)
        return observation, float(reward), bool(terminated), bool(truncated), info

    def discard(self) -> None:
        """Close the environment; the next `reset` makes another one."""
        environment, self._environment = self._environment, None
        self.ready = False
        if environment is not None:
            with contextlib.suppress(Exception):  # it is not used again
                environment.close()


@dataclass(slots=True)
class Lease:
    """The sub-environments that one client holds."""

    client: tuple[bytes, int]
    """Which vector environment, and which of its servers this is."""
    peer: Peer
    mode: AutoresetMode
    rows: list[SubEnvironment]


class EnvServer:
    """Lends ``num_envs`` environments to clients, and steps them. `serve` runs until `stop`.

    Args:
        name: what the environments are, for clients and logs.
        make: makes one environment, not yet reset.
        num_envs: environments to make, at once.
        address: ``tcp://HOST:PORT``.
        keys: None: connections are neither encrypted nor authenticated.
        heartbeat_s: seconds between two heartbeats.

    Raises:
        ConfigError: the address, the count or the spaces cannot be used.
    """

    def __init__(
        self,
        *,
        name: str,
        make: Callable[[], gymnasium.Env[Any, Any]],
        num_envs: int,
        address: str,
        keys: Keys | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        if not 0 < num_envs <= MAX_ROWS:
            message = "cannot be served by one process"
            raise ConfigError([Problem("--num-envs", num_envs, message, f"1 to {MAX_ROWS}")])
        self._name, self._count = name, num_envs
        self._free: list[SubEnvironment] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard_free)
            for _ in range(num_envs):
                self._free.append(SubEnvironment(make))
            first = self._free[0]
            observation_space, action_space = first.spaces
            self._observations, self._actions = Leaves(observation_space), Leaves(action_space)
            self._spaces = describe(observation_space), describe(action_space)
            self._metadata = sendable(first.metadata, Counter())
            self._max_frame = max(MIN_FRAME, 2 * num_envs * self._actions.nbytes)
            self._listener = TcpListener(
                address, keys=keys, max_frame=self._max_frame, heartbeat_s=heartbeat_s
            )
            undo.pop_all()
        self._batch = cache(lambda count: batch_space(action_space, count))
        self._leases: dict[bytes, Lease] = {}
        self._welcomed = self._refused = self._abandoned = self._steps = self._failures = 0
        self._dropped: Counter[str] = Counter()
        self._check_until = 0.0
        self._stopping = False

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen."""
        return self._listener.address

    @property
    def free(self) -> int:
        """Sub-environments that no client holds."""
        return len(self._free)

    def serve(self) -> None:
        """Handle messages until `stop` is called."""
        while not self._stopping:
            self.handle(POLL_S)

    def handle(self, timeout_s: float) -> None:
        """Handle the next message, if there is one within ``timeout_s``."""
        received = self._listener.receive(timeout_s)
        if received is not None:
            peer, message = received
            try:
                self._answer(peer, message)
            except MalformedMessageError as error:
                known = message.kind in (HELLO, RESET, STEP)
                mistake = f"in {message.kind}" if known else "unknown kind"
                self._listener.close_peer(peer, mistake, str(error))
                self._release(peer.id)
            return
        if self._listener.changed:
            self._listener.changed = False
            self._check_until = time.monotonic() + CHECK_S
        if time.monotonic() < self._check_until:
            self._release_unreachable()

    def stop(self) -> None:
        """Make `serve` return after the message at hand. From any thread, and from a signal."""
        self._stopping = True
        self._listener.wake()

    def close(self) -> None:
        """End all connections and close the environments."""
        self._listener.close()
        for lease in self._leases.values():
            self._free += lease.rows
        self._leases.clear()
        self._discard_free()

    def statistics(self) -> ServerStatistics:
        return ServerStatistics(
            welcomed=self._welcomed,
            refused=self._refused,
            abandoned=self._abandoned,
            steps=self._steps,
            failures=self._failures,
            infos_dropped=self._dropped.total(),
            connections=self._listener.statistics(),
        )

    def _discard_free(self) -> None:
        for row in self._free:
            row.discard()

    # Leases
    # ----------------------------------------------------------------------------------------------

    def _answer(self, peer: Peer, message: Message) -> None:
        lease = self._leases.get(peer.id)
        if message.kind == HELLO and lease is None:
            self._greet(peer, message)
        elif message.kind == BYE:
            self._release(peer.id)
        elif lease is not None and message.kind in (RESET, STEP):
            self._work(lease, message)
        else:
            raise MalformedMessageError(f"{message.kind[:64]!r} is not allowed here")

    def _greet(self, peer: Peer, message: Message) -> None:
        body = message.body
        protocol = part(body, "protocol", int)
        if protocol != PROTOCOL:
            self._refuse(
                peer,
                message,
                f"the client speaks version {protocol} of the protocol, {self._me} {PROTOCOL}",
            )
            return
        client = part(body, "client", bytes), part(body, "link", int)
        count = part(body, "count", int)
        try:
            mode = AutoresetMode(part(body, "autoreset", str))
        except ValueError as error:
            raise MalformedMessageError(str(error)) from None
        for lease in [lease for lease in self._leases.values() if lease.client == client]:
            self._abandon(lease)  # it returns before its old connection was found to be lost
        if count > len(self._free):
            self._release_unreachable()
        if not 0 < count <= len(self._free):
            text = (
                f"the client asks for {count} sub-environments, {self._me} has {self._count}, "
                f"of which {len(self._free)} are free"
            )
            self._refuse(peer, message, text, again=0 < count <= self._count)
            return
        largest = max((leaf.nbytes for leaf in self._observations.empty(1)), default=0)
        if largest * count > MAX_FRAME:
            text = (
                f"observations of {count} sub-environments, which the client asks for, are larger "
                f"than the {MAX_FRAME} bytes of a message of {self._me}: at most "
                f"{MAX_FRAME // largest} fit"
            )
            self._refuse(peer, message, text)
            return
        welcome = {
            "env": self._name,
            "observation_space": self._spaces[0],
            "action_space": self._spaces[1],
            "metadata": self._metadata,
            "max_frame": self._max_frame,
        }
        if self._listener.send(peer, encode(WELCOME, message.number, welcome)):
            leased, self._free = self._free[:count], self._free[count:]
            for row in leased:
                row.ready = False
            self._leases[peer.id] = Lease(client, peer, mode, leased)
            self._welcomed += 1
            log.info("client welcome", num_envs=count, free=len(self._free))

    @property
    def _me(self) -> str:
        return f"the server at {self.address}"

    def _refuse(self, peer: Peer, message: Message, reason: str, *, again: bool = False) -> None:
        self._refused += 1
        log.warning("client refused", reason=reason)
        body = {"reason": reason, "again": again}
        self._listener.send(peer, encode(REFUSAL, message.number, body))

    def _release(self, peer: bytes) -> None:
        lease = self._leases.pop(peer, None)
        if lease is not None:
            self._free += lease.rows
            log.info("client gone", free=len(self._free))

    def _abandon(self, lease: Lease) -> None:
        self._abandoned += 1
        self._release(lease.peer.id)

    def _release_unreachable(self) -> None:
        for lease in list(self._leases.values()):
            if not self._listener.reachable(lease.peer):
                self._abandon(lease)

    # Work
    # ----------------------------------------------------------------------------------------------

    def _work(self, lease: Lease, message: Message) -> None:
        indices = require_rows(message.body, len(lease.rows))
        work = self._reset if message.kind == RESET else self._step
        try:
            body = {"rows": indices, **work(lease, message.body, indices)}
            frames = self._frames(message.number, body)
        except _RowFailedError as failure:
            self._failures += 1
            lease.rows[failure.index].discard()
            error = failure.error
            log.warning("an environment failed", summary=error.summary)
            summary, details = error.summary[:DETAILS], error.details[-DETAILS:]
            body = {"row": failure.index, "summary": summary, "details": details}
            frames = encode(FAILURE, message.number, body)
        if not self._listener.send(lease.peer, frames):
            self._abandon(lease)

    def _frames(self, number: int, body: Info) -> list[Frame]:
        try:
            return encode(RESULT, number, body)
        except (TypeError, ValueError):
            before = self._dropped.total()
            infos = [sendable(info, self._dropped) for info in body["infos"]]
            if not before:
                log.warning("entries of infos cannot be sent", entries=sorted(self._dropped))
        try:
            return encode(RESULT, number, body | {"infos": infos})
        except ValueError:  # each can be sent, but not all of them at once
            self._dropped["(all)"] += 1
            return encode(RESULT, number, body | {"infos": None})

    def _reset(self, lease: Lease, body: object, indices: list[int]) -> Info:
        seeds = part(body, "seeds", list)
        options = part(body, "options", (dict, type(None)))
        if len(seeds) != len(indices) or not all(
            seed is None or (type(seed) is int and seed >= 0) for seed in seeds
        ):
            raise MalformedMessageError("there is not one seed for each sub-environment")
        arrays = self._observations.empty(len(indices))
        infos: list[Info] = []
        try:
            for at, index in enumerate(indices):
                observation, info = lease.rows[index].reset(seeds[at], options)
                self._observations.write(observation, arrays, at)
                infos.append(info)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise _RowFailedError(index, failed("reset", error)) from error
        self._steps += len(indices)
        return {"observation": arrays, "infos": infos if any(infos) else None}

    def _step(self, lease: Lease, body: object, indices: list[int]) -> Info:
        count = len(indices)
        actions = self._actions.require(part(body, "actions", list), count)
        if not all(lease.rows[index].ready for index in indices):
            raise MalformedMessageError("a sub-environment was not reset before it was stepped")
        each = iterate(self._batch(count), self._actions.join(actions))
        result = _Steps(self._observations, count)
        try:
            for at, (index, action) in enumerate(zip(indices, each, strict=True)):
                result.take(at, lease.rows[index], action, lease.mode)
            found = result.body()
        except (Exception, SystemExit) as error:  # as above
            raise _RowFailedError(index, failed("step", error)) from error
        self._steps += count
        return found


class _Steps:
    """Results of one step of ``count`` sub-environments, as they are sent."""

    def __init__(self, observations: Leaves, count: int) -> None:
        self._observations = observations
        self.arrays = observations.empty(count)
        self.reward = np.zeros(count, np.float64)
        self.over = np.zeros((2, count), np.bool_)
        """Terminated, and truncated."""
        self.infos: list[Info] = []
        self.ended: list[int] = []
        self.finals: list[Any] = []

    def take(self, at: int, row: SubEnvironment, action: Any, mode: AutoresetMode) -> None:
        """Step ``row``, or reset it, as its autoreset mode wants it."""
        if mode is AutoresetMode.NEXT_STEP and row.over:
            observation, info = row.reset(None, None)
        else:
            observation, self.reward[at], *over, info = row.step(action)
            self.over[:, at] = over
            if mode is AutoresetMode.SAME_STEP and row.over:
                self.ended.append(at)
                self.finals.append(observation)
                final = info
                observation, info = row.reset(None, None)
                info = {"final_info": final, **info}
        self._observations.write(observation, self.arrays, at)
        self.infos.append(info)

    def body(self) -> Info:
        finals: list[Array] = self._observations.empty(len(self.ended))
        for at, final in enumerate(self.finals):
            self._observations.write(final, finals, at)
        return {
            "observation": self.arrays,
            "reward": self.reward,
            "over": self.over,
            "infos": self.infos if any(self.infos) else None,
            "ended": self.ended,
            "final": finals if self.ended else None,
        }


class _RowFailedError(Exception):
    """Sub-environment ``index`` of a lease raised ``error``."""

    def __init__(self, index: int, error: EnvironmentFailedError) -> None:
        self.index, self.error = index, error
        super().__init__(error.summary)


def sendable(info: Mapping[Any, Any], dropped: Counter[str], path: str = "") -> Info:
    """The entries of ``info`` that can be sent. Names of the others are counted in ``dropped``."""
    found: Info = {}
    for key, value in info.items():
        name = f"{path}{key}"
        try:
            if isinstance(value, dict) and path.count("/") < MAX_NESTED:
                found[key] = sendable(value, dropped, f"{name}/")
            else:
                encode("", 0, {key: value})
                found[key] = value
        except (TypeError, ValueError):
            dropped[name] += 1
    return found
