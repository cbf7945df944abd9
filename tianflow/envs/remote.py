"""A vector environment whose sub-environments live in other processes or machines.

    actions -> RemoteVectorEnv -> servers (`tianflow env-server`) -> observations, in row order

`step` and `reset` are those of Gymnasium. `send` and `receive` do the same for some of the
sub-environments, while others still compute.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from tianflow.channels.frames import MalformedMessageError, Message, encode
from tianflow.channels.keys import Keys, read_keys, require_address, require_keys
from tianflow.channels.tcp import (
    HEARTBEAT_S,
    Context,
    RefusedConnectionError,
    TcpConnection,
    new_context,
    wait,
)
from tianflow.envs.remote_protocol import (
    FAILURE,
    HELLO,
    PROTOCOL,
    REFUSAL,
    RESET,
    RESULT,
    STEP,
    WELCOME,
    Array,
    Leaves,
    Space,
    build,
    part,
    require_array,
    require_rows,
    writable,
)
from tianflow.errors import (
    BrokenChannelError,
    ConfigError,
    EnvironmentFailedError,
    Problem,
    WouldBlock,
)
from tianflow.logs import logger

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
"""Pauses between attempts to connect: each is twice the one before."""
POLL_S = 1.0
"""Seconds after which a call that waits looks around, even if nothing happens."""
IDLE, SENT, ARRIVED = 0, 1, 2
"""Phases of a row: nothing to do, at its server, to be received."""
SEEDS = 2**31
"""Fresh seeds lie below this: every environment accepts them."""
FLOAT, BOOL = np.dtype(np.float64), np.dtype(np.bool_)
Info = dict[str, Any]
Rows = Sequence[int] | NDArray[np.integer[Any]]
log = logger("envs.remote")


class Received(NamedTuple):
    """What `RemoteVectorEnv.receive` returns. K rows, in sub-environment order."""

    rows: NDArray[np.int64]
    """[K], indices of sub-environments, ascending."""
    observation: Any
    """A batch of K observations."""
    reward: NDArray[np.float64]
    """[K]"""
    terminated: NDArray[np.bool_]
    """[K]"""
    truncated: NDArray[np.bool_]
    """[K]"""
    info: Info
    """As of a vector environment of these K sub-environments."""


@dataclass(frozen=True, slots=True)
class RemoteStatistics:
    """Counters of a `RemoteVectorEnv`, since it was made."""

    servers_lost: int
    """Times that the connection to a server was lost, or given up because it did not reply."""
    rows_lost: int
    """Episodes that were cut off by that: each is one row with ``truncated`` and ``info["lost"]``.
    """
    rejoined: int
    """Times that a lost server was joined again."""
    malformed: int
    """Malformed messages of servers; each ends its connection."""


@dataclass(slots=True)
class _Request:
    """One message to one server, and what becomes of its rows."""

    kind: Literal["reset", "step", "revive"]
    """``revive`` is a reset of this end's own, after a loss: it becomes the result of a step."""
    rows: list[int]
    """Indices in the whole vector, ascending."""
    seeds: list[int | None]
    options: Info | None = None
    actions: list[Array] | None = None


@dataclass(frozen=True, slots=True)
class _Offer:
    """The environments of a server, as its welcome describes them."""

    name: str
    observation_space: Space
    action_space: Space
    metadata: Info
    max_frame: int


@dataclass(frozen=True, slots=True)
class _Settings:
    """What all links of one vector share."""

    context: Context
    keys: Keys | None
    mode: AutoresetMode
    client: bytes
    connect_timeout_s: float
    heartbeat_s: float


class _Link:
    """One server: connected and joined, on the way to it, or lost.

    Attributes:
        rows: the indices of its sub-environments in the whole vector.
        joined: True if the server has lent its sub-environments and is not lost since.
        lost: True if it was joined, and was not joined again since.
        refused: True if the last attempt to join it was refused.
        requests: what it has not answered yet, by number.
        waiting: what to send as soon as it is joined.
        reason: why it was lost, or could not be joined yet.
        busy_since: when it was sent the first of ``requests``, or answered the last one.
    """

    def __init__(self, address: str, number: int, rows: range, settings: _Settings) -> None:
        self.address, self.rows, self._number, self._settings = address, rows, number, settings
        self.joined = self.lost = self.refused = False
        self.offer: _Offer | None = None
        self.requests: dict[int, _Request] = {}
        self.waiting: list[_Request] = []
        self.reason = "it was not joined yet"
        self.busy_since = 0.0
        self.connection: TcpConnection | None = None
        self._sent = 0
        self._pause_s = FIRST_RETRY_S
        self._next_attempt = 0.0
        self._attempt_ends = 0.0

    def connect(self, now: float) -> None:
        """Begin to join the server, if it is time for an attempt."""
        if self.connection is not None or now < self._next_attempt:
            return
        settings = self._settings
        self.connection = TcpConnection(
            settings.context, self.address, keys=settings.keys, heartbeat_s=settings.heartbeat_s
        )
        self._attempt_ends = now + settings.connect_timeout_s
        hello = {
            "protocol": PROTOCOL,
            "client": settings.client,
            "link": self._number,
            "count": len(self.rows),
            "autoreset": settings.mode.value,
        }
        self._sent += 1
        with contextlib.suppress(BrokenChannelError):  # refused in this moment; `receive` says why
            self.connection.send(encode(HELLO, self._sent, hello))

    def disconnect(self, reason: str, now: float, *, farewell: bool = False) -> None:
        """End the connection; the next attempt is made after a pause."""
        if self.connection is not None:
            self.connection.close(farewell=farewell)
        self.connection, self.joined, self.reason = None, False, reason
        self.refused = False
        self._next_attempt = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_RETRY_S)

    def expire(self, now: float) -> None:
        """Give up an attempt that takes too long."""
        if self.connection is not None and not self.joined and now >= self._attempt_ends:
            self.disconnect(f"it did not answer within {self._settings.connect_timeout_s:g} s", now)

    def due(self) -> float:
        """When `connect` or `expire` has something to do."""
        if self.joined:
            return float("inf")
        return self._next_attempt if self.connection is None else self._attempt_ends

    def receive(self, now: float) -> Iterator[Message]:
        """Results and failures that have arrived. Welcomes and refusals are handled here.

        Raises:
            BrokenChannelError, MalformedMessageError: the connection is of no use any more.
            RefusedConnectionError: the server does not match, and the reason does not pass.
        """
        while self.connection is not None:
            try:
                message = self.connection.receive_nowait()
                if not self.joined:
                    self._greeted(message)
                    continue
            except WouldBlock:
                return
            except RefusedConnectionError as error:
                if not error.again:
                    raise
                self.disconnect(str(error), now)
                self.refused = True
                return
            yield message

    def _greeted(self, message: Message) -> None:
        if message.kind == REFUSAL:
            reason = part(message.body, "reason", str)
            raise RefusedConnectionError(reason, again=part(message.body, "again", bool))
        if message.kind != WELCOME:
            raise MalformedMessageError(f"{message.kind[:64]!r} before a welcome")
        self._accept(message.body)

    def _accept(self, body: object) -> None:
        offer = _Offer(
            part(body, "env", str),
            build(part(body, "observation_space", list)),
            build(part(body, "action_space", list)),
            part(body, "metadata", dict),
            part(body, "max_frame", int),
        )
        if self.offer is not None:
            require_same(self.address, offer, "before it had", self.offer)
        self.offer, self.joined = offer, True
        self._pause_s = FIRST_RETRY_S

    def send(self, request: _Request, now: float) -> None:
        """Send ``request``.

        Raises:
            ValueError, TypeError: it cannot be sent: options of a reset that are not plain data.
            BrokenChannelError: the server does not read.
        """
        assert self.connection is not None
        assert self.offer is not None
        first = self.rows[0]
        body: Info = {"rows": [row - first for row in request.rows]}
        if request.kind == "step":
            body["actions"] = request.actions
        else:
            body |= {"seeds": request.seeds, "options": request.options}
        kind = STEP if request.kind == "step" else RESET
        frames = encode(kind, self._sent + 1, body, max_frame=self.offer.max_frame)
        self._sent += 1
        if not self.requests:
            self.busy_since = now
        self.requests[self._sent] = request
        self.connection.send(frames)

    def answered(self, message: Message, now: float) -> _Request | None:
        """The request that ``message`` answers; None if it was abandoned. It stays in ``requests``
        until its answer proves valid.

        Raises:
            MalformedMessageError: there never was one.
        """
        self.busy_since = now
        if message.kind not in (RESULT, FAILURE) or not 0 < message.number <= self._sent:
            raise MalformedMessageError(f"{message.kind[:64]!r} answers no request")
        return self.requests.get(message.number)


def require_same(address: str, offer: _Offer, other: str, first: _Offer) -> None:
    """Compare the spaces that ``address`` offers with those that ``other`` offered first.

    Raises:
        RefusedConnectionError: they differ; the text names both.
    """
    for what in ("observation_space", "action_space"):
        found, wanted = getattr(offer, what), getattr(first, what)
        if found != wanted:
            raise RefusedConnectionError(
                f"the {what.replace('_', ' ')}s do not match: {address} has {found}, "
                f"{other} {wanted}"
            )


class RemoteVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """``num_envs`` sub-environments, shared evenly among servers: the first server has the first
    rows. Servers that would get none are not asked.

    A server that dies, or does not reply in time, ends the episodes of its rows. With ``on_lost =
    "truncate"`` each becomes one row with its last observation, reward 0, ``truncated`` and
    ``info["lost"]``, the reason; the next episode waits for the server to return and has a fresh
    seed. With ``"error"`` the call raises, and `reset` joins the server again. `statistics` counts.

    Arrays that are returned are copies. One thread at a time may use it.

    Args:
        num_envs: sub-environments.
        addresses: of servers, ``tcp://HOST:PORT``.
        key_file: the file that the servers wrote; not needed on loopback addresses.
        insecure: True: addresses off loopback are used without a key, with a warning.
        autoreset_mode: a mode of Gymnasium, or its value.
        on_lost: what the loss of a server becomes, "truncate" or "error".
        connect_timeout_s: seconds for the first connection to all servers, and for each later one.
        reply_timeout_s: seconds after which a server without a reply is given up.
        rejoin_timeout_s: seconds for which a call waits for a lost server.
        heartbeat_s: seconds between two heartbeats of a connection.

    Raises:
        ConfigError: an argument is not valid, or the key file cannot be used.
        RefusedConnectionError: a server does not match: spaces, counts, protocol or key; or it has
            lent its sub-environments to others.
        BrokenChannelError: a server cannot be reached.
    """

    def __init__(
        self,
        num_envs: int,
        addresses: Sequence[str],
        *,
        key_file: str | None = None,
        insecure: bool = False,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        on_lost: Literal["truncate", "error"] = "truncate",
        connect_timeout_s: float = 10.0,
        reply_timeout_s: float = 20.0,
        rejoin_timeout_s: float = 30.0,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.closed = True  # until there is something to close
        self.num_envs = num_envs
        self.autoreset_mode = _require_mode(autoreset_mode)
        if on_lost not in ("truncate", "error"):
            problem = Problem("on_lost", on_lost, "is not a valid choice", "truncate, error")
            raise ConfigError([problem])
        self._on_lost = on_lost
        for name, seconds in (
            ("connect_timeout_s", connect_timeout_s),
            ("reply_timeout_s", reply_timeout_s),
            ("rejoin_timeout_s", rejoin_timeout_s),
            ("heartbeat_s", heartbeat_s),
        ):
            if not 0 < seconds < 1e6:
                raise ConfigError([Problem(name, seconds, "is not a valid time", "seconds, > 0")])
        self._reply_timeout_s, self._rejoin_timeout_s = reply_timeout_s, rejoin_timeout_s
        shares = _shares(num_envs, addresses)
        keys = None if key_file is None else read_keys(key_file)
        for address in shares:
            require_keys(address, keys, insecure=insecure, path="addresses")
        self._context = new_context()
        settings = _Settings(
            context=self._context,
            keys=keys,
            mode=self.autoreset_mode,
            client=secrets.token_bytes(16),
            connect_timeout_s=connect_timeout_s,
            heartbeat_s=heartbeat_s,
        )
        self._links = [
            _Link(address, number, share, settings)
            for number, (address, share) in enumerate(shares.items())
        ]
        self._all = np.arange(num_envs)
        self._phase = np.zeros(num_envs, np.int8)
        self._pending = 0
        """Rows that are sent and have not arrived."""
        self._begun = np.zeros(num_envs, np.bool_)
        """True if a row was reset, so that it can be stepped."""
        self._ended = np.zeros(num_envs, np.bool_)
        """True if the episode of a row is over, and nothing has reset it since."""
        self._stale = np.zeros(num_envs, np.bool_)
        """True if the server no longer has the episode of a row."""
        self._finals: dict[int, tuple[list[Array], Info]] = {}
        """With SAME_STEP, last observations and infos of rows that are lost and wait for a reset.
        """
        self._fresh = np.random.SeedSequence()
        self._lost = self._rows_lost = self._rejoined = self._malformed = 0
        self._failure: BrokenChannelError | None = None
        self.closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._join(connect_timeout_s)
            self._use_spaces()
            undo.pop_all()

    def _use_spaces(self) -> None:
        """Spaces as the servers have them, and memory for one result of each row."""
        offers = [(link.address, link.offer) for link in self._links if link.offer is not None]
        address, first = offers[0]
        for other, offer in offers[1:]:
            require_same(other, offer, address, first)
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self._observations = Leaves(first.observation_space)
        self._actions = Leaves(first.action_space)
        self._row_observation = self._observations.empty(self.num_envs)
        self._row_reward = np.zeros(self.num_envs, np.float64)
        self._row_over = np.zeros((2, self.num_envs), np.bool_)
        self._row_info: list[Info | None] = [None] * self.num_envs

    # Gymnasium's interface
    # ----------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: Info | None = None
    ) -> tuple[Any, Info]:
        """Begin an episode in all sub-environments, or those of ``options["reset_mask"]``.

        Args:
            seed: row i is seeded with ``seed + i``, or with ``seed[i]``; None: at random.
            options: for each sub-environment; plain data and arrays. ``reset_mask`` is [num_envs]
                bool and is not passed on.

        Returns:
            A batch of observations, for rows outside the mask the last ones, and the infos.

        Raises:
            EnvironmentFailedError: an environment raised.
            BrokenChannelError: a server is lost and does not return in time.
        """
        self._require_idle("reset")
        seeds = self._require_seeds(self._seeds(seed))
        mask, options = self._mask(options)
        chosen = np.flatnonzero(mask)
        if seed is not None:
            self._fresh = np.random.SeedSequence([one or 0 for one in seeds])
            super().reset(seed=seeds[0])
        self._start(chosen)
        with self._abandoning():
            for link, inner in self._by_link(chosen):
                request = _Request("reset", inner, [seeds[row] for row in inner], options)
                self._submit(link, request)
            self._wait(lambda: self._pending == 0)
        info = self._take_infos(chosen, chosen.tolist(), self.num_envs)
        self._phase[chosen] = IDLE
        return self._observation(self._all), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Info]:
        """One step of every sub-environment. Raises as `reset`."""
        self.send(actions)
        return self.receive()[1:]

    def send(self, actions: Any, rows: Rows | None = None) -> None:
        """Begin a step of some sub-environments, all of which have nothing to receive.

        Args:
            actions: a batch of one action for each of ``rows``.
            rows: ascending indices; None: all.

        Raises:
            ValueError: the actions or rows are not valid.
            gymnasium.error.ResetNeeded: one of them was not reset.
            BrokenChannelError: a server is lost, with ``on_lost = "error"``.
        """
        self._require_open()
        chosen = self._all if rows is None else self._require_rows(rows)
        if self._phase[chosen].any():
            raise AlreadyPendingCallError("a row that is stepped was not received yet", "step")
        if not self._begun[chosen].all():
            raise ResetNeeded("a sub-environment has to be reset before it is stepped")
        if (
            self.autoreset_mode is AutoresetMode.DISABLED
            and (self._stale & self._ended)[chosen].any()
        ):
            raise ResetNeeded("a lost sub-environment has to be reset before it is stepped")
        parts = self._split(actions, len(chosen))
        self._start(chosen)
        with self._abandoning():
            begin = 0
            for link, inner in self._by_link(chosen):
                end = begin + len(inner)
                self._step(link, inner, [array[begin:end] for array in parts])
                begin = end
            self._raise_failure()

    def receive(self, rows: Rows | None = None, *, at_least: int | None = None) -> Received:
        """Results of steps that `send` began, in sub-environment order. Rows that were sent to one
        server together arrive together.

        Args:
            rows: ascending indices of rows to wait for; None: all that were sent.
            at_least: wait only until so many of them have arrived, and return those.

        Raises:
            ValueError: ``rows`` or ``at_least`` are not valid.
            gymnasium.error.NoAsyncCallError: one of ``rows`` was not sent, or none was.
            EnvironmentFailedError, BrokenChannelError: as `reset`.
        """
        self._require_open()
        chosen = np.flatnonzero(self._phase) if rows is None else self._require_rows(rows)
        if not len(chosen) or not self._phase[chosen].all():
            raise NoAsyncCallError("a row that is to be received was not sent", "receive")
        if at_least is not None and not 0 < at_least <= len(chosen):
            raise ValueError(f"at_least = {at_least} of {len(chosen)} rows; accepted: 1 to all")
        wanted = len(chosen) if at_least is None else at_least

        def enough() -> bool:
            return int(np.count_nonzero(self._phase[chosen] == ARRIVED)) >= wanted

        with self._abandoning():
            self._wait(enough)
        return self._collect(chosen[self._phase[chosen] == ARRIVED])

    def statistics(self) -> RemoteStatistics:
        return RemoteStatistics(self._lost, self._rows_lost, self._rejoined, self._malformed)

    def close_extras(self, **_: Any) -> None:
        """Return the sub-environments to their servers and end the connections."""
        for link in self._links:
            link.disconnect("it was closed", time.monotonic(), farewell=link.joined)
        self._context.term()

    def __del__(self) -> None:
        """Connections do not outlast the vector."""
        if not getattr(self, "closed", True):
            self.close()

    # Arguments
    # ----------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("the vector environment is closed")

    def _require_idle(self, doing: str) -> None:
        self._require_open()
        if self._phase.any():
            raise AlreadyPendingCallError("steps that were sent were not received yet", doing)

    def _require_rows(self, rows: Rows) -> NDArray[np.int64]:
        chosen = np.asarray(rows)
        if (
            chosen.ndim != 1
            or not len(chosen)
            or chosen.dtype.kind not in "iu"
            or chosen[0] < 0
            or chosen[-1] >= self.num_envs
            or (np.diff(chosen) <= 0).any()
        ):
            raise ValueError(f"rows = {rows!r}; accepted: ascending, of 0 to {self.num_envs - 1}")
        return chosen.astype(np.int64)

    def _seeds(self, seed: int | list[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + row for row in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"{len(seed)} seeds for {self.num_envs} sub-environments")
        return [None if one is None else int(one) for one in seed]

    @staticmethod
    def _require_seeds(seeds: list[int | None]) -> list[int | None]:
        for seed in seeds:
            if seed is not None and not 0 <= seed < 2**64:
                raise ValueError(f"seed {seed} is not valid; accepted: 0 to 2^64 - 1")
        return seeds

    def _mask(self, options: Info | None) -> tuple[NDArray[np.bool_], Info | None]:
        """Which rows to reset, and the other options."""
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, np.bool_), options
        mask = options["reset_mask"]
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError("options['reset_mask'] is not an array of booleans")
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(
                f"options['reset_mask'] needs shape ({self.num_envs},) and a row that is True"
            )
        return mask, {key: value for key, value in options.items() if key != "reset_mask"}

    def _split(self, actions: Any, count: int) -> list[Array]:
        """A copy of ``actions`` as one array [count, *leaf] for each leaf."""
        found = []
        for leaf, given in zip(self._actions.leaves, self._actions.split(actions), strict=True):
            array = np.asarray(given)
            if array.shape != (count, *leaf.shape):
                shape = (count, *leaf.shape)
                raise ValueError(f"actions have shape {array.shape} instead of {shape}")
            found.append(array.astype(leaf.dtype, casting="same_kind"))
        return found

    # Rows
    # ----------------------------------------------------------------------------------------------

    def _by_link(self, chosen: NDArray[Any]) -> Iterator[tuple[_Link, list[int]]]:
        """The servers of the rows ``chosen``, each with its own."""
        for link in self._links:
            begin, end = np.searchsorted(chosen, (link.rows.start, link.rows.stop))
            if end > begin:
                yield link, chosen[begin:end].tolist()

    def _start(self, chosen: NDArray[Any]) -> None:
        self._phase[chosen] = SENT
        self._pending += len(chosen)

    def _arrive(self, row_or_rows: Any, count: int) -> None:
        self._phase[row_or_rows] = ARRIVED
        self._pending -= count

    def _submit(self, link: _Link, request: _Request) -> None:
        """Send ``request``, or let it wait until the server is joined."""
        if not link.joined:
            link.waiting.append(request)
            return
        try:
            link.send(request, time.monotonic())
        except BrokenChannelError as error:
            self._lose(link, str(error))

    def _step(self, link: _Link, inner: list[int], actions: list[Array]) -> None:
        """Step the rows ``inner`` of one server. Those whose episode the server no longer has are
        lost, or are reset if their episode was over.
        """
        stale = self._stale[inner]
        if not stale.any():
            self._submit(link, _Request("step", inner, [], actions=actions))
            return
        if self._on_lost == "error":
            self._failure = self._loss(link)
            return
        lost = [row for row, is_stale in zip(inner, stale, strict=True) if is_stale]
        valid = [row for row, is_stale in zip(inner, stale, strict=True) if not is_stale]
        if valid:
            self._submit(
                link, _Request("step", valid, [], actions=[array[~stale] for array in actions])
            )
        self._lose_rows(link, lost)

    def _lose_rows(self, link: _Link, inner: list[int]) -> None:
        """Give rows that were to be stepped the result of a loss."""
        revived = []
        for row in inner:
            if self._ended[row]:  # this step was only going to reset it: nothing is lost
                revived.append(row)
                continue
            self._rows_lost += 1
            info = {"lost": link.reason}
            self._row_reward[row], self._row_over[:, row] = 0.0, (False, True)
            if self.autoreset_mode is AutoresetMode.SAME_STEP:
                final = [array[row].copy() for array in self._row_observation]
                self._finals[row] = final, info
                revived.append(row)
            else:
                self._row_info[row], self._ended[row] = info, True
                self._arrive(row, 1)
        if revived:
            seeds: list[int | None] = [*self._fresh_seeds(len(revived))]
            self._submit(link, _Request("revive", revived, seeds))

    def _fresh_seeds(self, count: int) -> list[int]:
        (child,) = self._fresh.spawn(1)
        return [int(word) % SEEDS for word in child.generate_state(count)]

    def _handle(self, link: _Link, message: Message, now: float) -> None:
        """Write a result into its rows."""
        request = link.answered(message, now)
        if request is None:
            return
        if message.kind == FAILURE:
            row = link.rows[0] + part(message.body, "row", int)
            summary = part(message.body, "summary", str)
            raise EnvironmentFailedError(
                f"sub-environment {row} at {link.address}: {summary}",
                part(message.body, "details", str),
            )
        body, count = message.body, len(request.rows)
        if require_rows(body, len(link.rows)) != [row - link.rows[0] for row in request.rows]:
            raise MalformedMessageError("a result has other rows than its request")
        arrays = self._observations.require(part(body, "observation", list), count)
        infos = part(body, "infos", (list, type(None)))
        if infos is not None and [type(info) for info in infos] != [dict] * count:
            raise MalformedMessageError("there is not one info for each row")
        where = _where(request.rows)
        given: list[Info | None] = [None] * count if infos is None else infos
        if request.kind == "step":
            self._take_step(request, where, body, given)
        else:
            self._take_reset(request, where, given)
        for mine, array in zip(self._row_observation, arrays, strict=True):
            mine[where] = array
        del link.requests[message.number]
        self._arrive(where, count)

    def _take_step(
        self, request: _Request, where: Any, body: Info, infos: list[Info | None]
    ) -> None:
        count = len(request.rows)
        reward = require_array(body.get("reward"), (count,), FLOAT)
        over = require_array(body.get("over"), (2, count), BOOL)
        ended = part(body, "ended", list)
        if ended:
            require_rows({"rows": ended}, count)
            finals = self._observations.require(body.get("final"), len(ended))
            for at, index in enumerate(ended):
                final = self._observations.join([array[at].copy() for array in finals])
                infos[index] = {**(infos[index] or {}), "final_obs": final}
        self._row_reward[where], self._row_over[:, where] = reward, over
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            self._ended[where] = over.any(0)
        self._write_infos(request.rows, infos)

    def _take_reset(self, request: _Request, where: Any, infos: list[Info | None]) -> None:
        self._begun[where], self._ended[where], self._stale[where] = True, False, False
        self._row_reward[where], self._row_over[:, where] = 0.0, False
        self._write_infos(request.rows, infos)
        for row in request.rows:
            lost = self._finals.pop(row, None)
            if lost is not None:
                arrays, info = lost
                self._row_over[1, row] = True
                self._row_info[row] = {
                    "final_info": info,
                    "final_obs": self._observations.join(arrays),
                    **info,
                    **(self._row_info[row] or {}),
                }

    def _write_infos(self, inner: list[int], infos: list[Info | None]) -> None:
        for row, info in zip(inner, infos, strict=True):
            self._row_info[row] = writable(info) if info else None

    def _observation(self, chosen: NDArray[Any]) -> Any:
        """A copy of the last observations of the rows ``chosen``."""
        if len(chosen) == self.num_envs:
            return self._observations.join([array.copy() for array in self._row_observation])
        return self._observations.join([array[chosen] for array in self._row_observation])

    def _take_infos(self, chosen: NDArray[Any], places: Sequence[int], count: int) -> Info:
        """Infos of the rows ``chosen``, at ``places`` of a vector of ``count``."""
        info: Info = {}
        batch = _InfoBatch(count)
        for place, row in zip(places, chosen.tolist(), strict=True):
            found, self._row_info[row] = self._row_info[row], None
            if found:
                info = batch.add(info, found, place)
        return info

    def _collect(self, chosen: NDArray[Any]) -> Received:
        """Copies of rows that have arrived, which then have nothing to receive."""
        self._phase[chosen] = IDLE
        return Received(
            chosen.copy(),
            self._observation(chosen),
            self._row_reward[chosen],
            self._row_over[0, chosen],
            self._row_over[1, chosen],
            self._take_infos(chosen, range(len(chosen)), len(chosen)),
        )

    # Servers
    # ----------------------------------------------------------------------------------------------

    def _join(self, timeout_s: float) -> None:
        """Join all servers for the first time."""
        ends = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self._tend(now)
            missing = [link for link in self._links if not link.joined]
            if not missing:
                return
            if now >= ends:
                link = missing[0]
                kind = RefusedConnectionError if link.refused else BrokenChannelError
                raise kind(f"{link.address} was not joined within {timeout_s:g} s: {link.reason}")
            self._sleep(min(ends, *(link.due() for link in missing)))

    def _wait(self, done: Callable[[], bool]) -> None:
        """Handle messages until ``done``."""
        started = time.monotonic()
        while True:
            now = time.monotonic()
            self._tend(now)
            self._raise_failure()
            if done():
                return
            until = now + POLL_S
            for link in self._links:
                ends = self._ends(link, started)
                if now < ends:
                    until = min(until, ends, link.due())
                elif link.requests:
                    self._lose(link, f"it did not reply within {self._reply_timeout_s:g} s")
                    until = now
                else:
                    seconds = self._rejoin_timeout_s
                    text = f"{link.address} is lost and was not joined again within {seconds:g} s"
                    raise BrokenChannelError(f"{text}: {link.reason}")
            self._sleep(until)

    def _ends(self, link: _Link, started: float) -> float:
        """When to stop waiting for ``link``, in a call that ``started`` to wait then."""
        if link.requests:
            return link.busy_since + self._reply_timeout_s
        if link.waiting and not link.joined:
            return started + self._rejoin_timeout_s
        return float("inf")

    def _sleep(self, until: float) -> None:
        connections = [link.connection for link in self._links if link.connection is not None]
        seconds = until - time.monotonic()
        if connections:
            wait(connections, seconds)
        else:  # a poll of no sockets returns at once
            time.sleep(max(0.0, seconds))

    def _tend(self, now: float) -> None:
        """Handle all that has arrived, and try to join servers that are not joined."""
        for link in self._links:
            try:
                for message in link.receive(now):
                    self._handle(link, message, now)
            except BrokenChannelError as error:
                self._drop(link, str(error), now)
            except MalformedMessageError as error:
                self._malformed += 1
                self._drop(link, f"it sent a malformed message: {error}", now)
            if link.joined:
                self._joined(link)
            else:
                link.expire(now)
                link.connect(now)

    def _joined(self, link: _Link) -> None:
        if link.lost:
            link.lost = False
            self._rejoined += 1
            log.info("server joined again", address=link.address)
        if link.waiting:
            waiting, link.waiting = link.waiting, []
            for request in waiting:
                self._submit(link, request)

    def _drop(self, link: _Link, reason: str, now: float) -> None:
        """A connection is of no use any more: that of a server, or one that was to become so."""
        if link.joined:
            self._lose(link, reason)
        else:
            link.disconnect(reason, now)

    def _lose(self, link: _Link, reason: str) -> None:
        """Give up a server that was joined: episodes of its rows are lost."""
        log.warning("server lost", address=link.address, reason=reason)
        link.disconnect(reason, time.monotonic())
        link.lost = True
        self._lost += 1
        self._stale[link.rows.start : link.rows.stop] = True
        requests, link.requests = list(link.requests.values()), {}
        if requests and self._on_lost == "error":
            self._failure = self._loss(link)
            return
        for request in requests:
            if request.kind == "step":
                self._lose_rows(link, request.rows)
            else:
                link.waiting.append(request)

    @staticmethod
    def _loss(link: _Link) -> BrokenChannelError:
        text = f"{link.address} is lost with the episodes of rows {link.rows.start} to"
        return BrokenChannelError(f"{text} {link.rows.stop - 1}: {link.reason}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def _abandoning(self) -> Iterator[None]:
        """After an error every row has to be reset: what was sent is not waited for any more."""
        try:
            yield
        except BaseException:
            for link in self._links:
                link.requests.clear()
                link.waiting.clear()
            self._phase[:], self._begun[:] = IDLE, False
            self._pending, self._failure = 0, None
            self._finals.clear()
            self._row_info = [None] * self.num_envs
            raise


class _InfoBatch(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Combines infos as Gymnasium's own vector environments do, for ``count`` of them."""

    def __init__(self, count: int) -> None:
        self.num_envs = count

    def add(self, batch: Info, info: Info, place: int) -> Info:
        """``batch`` with the entries of ``info`` at ``place``.

        Gymnasium cannot combine values of some different types and shapes. Those become arrays of
        objects: what an environment reports beside its results must not end a run.
        """
        for key, value in info.items():
            try:
                batch = self._add_info(batch, {key: value}, place)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                mask = batch.get(f"_{key}", np.zeros(self.num_envs, np.bool_))
                values = np.full(self.num_envs, None, object)
                for other in np.flatnonzero(mask):
                    values[other] = _at(batch[key], int(other))
                values[place], mask[place] = value, True
                batch[key], batch[f"_{key}"] = values, mask
        return batch


def _at(values: Any, place: int) -> Any:
    """The entry of one sub-environment in a batch of infos."""
    if isinstance(values, dict):
        given = {key for key in values if values.get(f"_{key}", [False] * (place + 1))[place]}
        return {key: _at(values[key], place) for key in given}
    return values[place]


def _where(inner: list[int]) -> Any:
    """An index of the rows ``inner``, as quick as possible."""
    first, last = inner[0], inner[-1]
    return slice(first, last + 1) if last - first + 1 == len(inner) else inner


def _shares(num_envs: int, addresses: Sequence[str]) -> dict[str, range]:
    """Which rows each server has: as evenly as possible, the first ones in order."""
    if num_envs < 1:
        raise ConfigError([Problem("num_envs", num_envs, "is not a valid count", "1 or more")])
    if not isinstance(addresses, list | tuple) or not addresses:
        accepted = "a list of tcp://HOST:PORT"
        raise ConfigError([Problem("addresses", addresses, "is not a list of servers", accepted)])
    if len(set(addresses)) < len(addresses):
        message = "names a server twice"
        raise ConfigError([Problem("addresses", list(addresses), message, "each server once")])
    valid = [require_address(address, path="addresses") for address in addresses]
    used = valid[:num_envs]
    each, more = divmod(num_envs, len(used))
    shares, begin = {}, 0
    for number, address in enumerate(used):
        end = begin + each + (number < more)
        shares[address], begin = range(begin, end), end
    return shares


def _require_mode(mode: str | AutoresetMode) -> AutoresetMode:
    try:
        return AutoresetMode(mode)
    except ValueError:
        accepted = ", ".join(known.value for known in AutoresetMode)
        problem = Problem("autoreset_mode", mode, "is not a valid choice", accepted)
        raise ConfigError([problem]) from None
