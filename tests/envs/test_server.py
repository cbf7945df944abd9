"""The server of environments and its protocol: valid, invalid and late requests."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.e2e.harness import until
from tests.support.fuzz_frames import HELLO_BODY
from tests.support.remote_worlds import EchoEnv, serving
from tianflow.channels.frames import Message, encode
from tianflow.channels.tcp import TcpConnection, new_context, wait
from tianflow.config.model import EnvSettings
from tianflow.envs.make import make_single
from tianflow.envs.remote import RemoteVectorEnv
from tianflow.envs.remote_protocol import FAILURE, HELLO, REFUSAL, RESET, RESULT, STEP, WELCOME
from tianflow.envs.server import MAX_NESTED, EnvServer, sendable
from tianflow.errors import BrokenChannelError, ConfigError, WouldBlock


class Client:
    """A client that says what it is asked to say."""

    def __init__(self, connection: TcpConnection) -> None:
        self.connection, self.number = connection, 0

    def ask(self, kind: str, body: object) -> Message | None:
        """The answer; None if the connection was closed."""
        self.number += 1
        self.connection.send(encode(kind, self.number, body))
        found: list[Message | None] = []

        def look() -> bool:
            try:
                found.append(self.connection.receive_nowait())
            except WouldBlock:
                wait([self.connection], 1.0)
            except BrokenChannelError:
                found.append(None)
            return bool(found)

        until("an answer, or the end", look)
        return found[0]


@contextmanager
def client(server: EnvServer, count: int | None = None) -> Iterator[Client]:
    context = new_context()
    connection = TcpConnection(context, server.address)
    made = Client(connection)
    try:
        if count is not None:
            answer = made.ask(
                HELLO, {**HELLO_BODY, "count": count, "client": bytes(15) + b"%c" % count}
            )
            assert answer is not None
            assert WELCOME == answer.kind
        yield made
    finally:
        connection.close()
        context.term()


def reset(rows: list[int]) -> dict[str, Any]:
    return {"rows": rows, "seeds": [1] * len(rows), "options": None}


def step(rows: list[int]) -> dict[str, Any]:
    return {"rows": rows, "actions": [np.ones(len(rows), np.int64)]}


def test_it_answers_in_the_order_of_the_rows() -> None:
    with serving() as server, client(server, 3) as one:
        answer = one.ask(RESET, reset([0, 2]))
        assert answer is not None
        assert (RESULT, 2, [0, 2]) == (answer.kind, answer.number, answer.body["rows"])
        answer = one.ask(STEP, step([2]))
        assert answer is not None
        assert [[1.0, 1.0]] == answer.body["observation"][0][:, 2:].tolist()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (HELLO, HELLO_BODY),
        ("nonsense", None),
        (WELCOME, {}),
        (STEP, step([1])),
        (STEP, step([3])),
        (STEP, {"rows": [0], "actions": [np.ones(2, np.int64)]}),
        (STEP, {"rows": [0], "actions": [np.ones(1)]}),
        (STEP, {"rows": [0], "actions": []}),
        (STEP, {"rows": [0]}),
        (STEP, None),
        (RESET, {**reset([0]), "seeds": []}),
        (RESET, {**reset([0]), "seeds": [-1]}),
        (RESET, {**reset([0]), "seeds": [True]}),
        (RESET, {**reset([0]), "options": []}),
        (RESET, {**reset([0]), "rows": "0"}),
    ],
)
def test_a_request_that_is_not_allowed_ends_the_connection_and_the_lease(
    kind: str, body: object
) -> None:
    with serving(num_envs=3) as server, client(server, 2) as bad, client(server, 1) as good:
        assert bad.ask(RESET, reset([0])) is not None
        assert bad.ask(kind, body) is None
        until("it is returned", lambda: server.free == 2)
        assert good.ask(RESET, reset([0])) is not None
        assert 1 == sum(server.statistics().connections.malformed.values())
        assert 0 == server.statistics().abandoned


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {**HELLO_BODY, "protocol": "1"},
        {**HELLO_BODY, "client": "c"},
        {**HELLO_BODY, "count": 1.0},
        {**HELLO_BODY, "autoreset": "Never"},
    ],
)
def test_an_invalid_greeting_ends_the_connection(body: object) -> None:
    with serving() as server, client(server) as bad:
        assert bad.ask(HELLO, body) is None
        assert 4 == server.free


@pytest.mark.parametrize("count", [0, -1, 5, 2**40])
def test_a_count_that_it_does_not_have_is_refused(count: int) -> None:
    with serving() as server, client(server) as one:
        answer = one.ask(HELLO, {**HELLO_BODY, "count": count})
        assert answer is not None
        assert (REFUSAL, False) == (answer.kind, answer.body["again"])
        assert 4 == server.free


def test_a_client_that_returns_gets_back_what_it_had() -> None:
    """Its old connection may be found to be lost only later."""
    with serving(num_envs=2) as server, client(server, 2), client(server, 2) as again:
        assert again.ask(RESET, reset([0, 1])) is not None
        assert 1 == server.statistics().abandoned


@cache
def huge_space() -> gymnasium.spaces.Box:
    """Its bounds are arrays of 40 MiB, which only one test needs."""
    return gymnasium.spaces.Box(0, 255, (40, 1024, 1024), np.uint8)


class HugeEnv(EchoEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = huge_space()


def test_observations_that_fit_in_no_message_are_refused_with_the_count_that_fits() -> None:
    with serving(HugeEnv, 2) as server, client(server) as one:
        answer = one.ask(HELLO, {**HELLO_BODY, "count": 2})
        assert answer is not None
        assert REFUSAL == answer.kind
        assert "at most 1 fit" in answer.body["reason"]


class OnceEnv(EchoEnv):
    """Cannot be made a second time after a failure."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        OnceEnv.made += 1
        if OnceEnv.made > 1:
            raise RuntimeError("there is only one")

    def step(self, action: Any) -> Any:
        raise SystemExit


def test_an_environment_that_cannot_be_made_again_fails_only_its_requests() -> None:
    OnceEnv.made = 0
    with serving(OnceEnv, 1) as server, client(server, 1) as one:
        assert one.ask(RESET, reset([0])) is not None
        for kind, body in ((STEP, step([0])), (RESET, reset([0])), (RESET, reset([0]))):
            answer = one.ask(kind, body)
            assert answer is not None
            assert FAILURE == answer.kind
        assert "there is only one" in answer.body["summary"]
        assert 3 == server.statistics().failures


class StrictEnv(EchoEnv):
    def step(self, action: Any) -> Any:
        np.seterr(all="raise")
        return super().step(action)


def test_the_numpy_errors_of_an_environment_stay_its_own() -> None:
    server = EnvServer(name="x", make=StrictEnv, num_envs=1, address="tcp://127.0.0.1:*")
    try:
        before = np.geterr()
        row = server._free[0]
        row.reset(1, None)
        row.step(1)
        assert before == np.geterr()
    finally:
        server.close()


class ClosingEnv(EchoEnv):
    closed: list[int] = []  # noqa: RUF012 - of all of them

    def close(self) -> None:
        ClosingEnv.closed.append(id(self))
        raise RuntimeError("in vain")


def test_every_environment_is_closed_at_the_end_lent_or_not() -> None:
    ClosingEnv.closed.clear()
    with serving(ClosingEnv, 3) as server, client(server, 2):
        pass
    assert 3 == len(set(ClosingEnv.closed))


@pytest.mark.parametrize("count", [0, 5000])
def test_a_count_that_no_process_serves_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="--num-envs"):
        EnvServer(name="x", make=EchoEnv, num_envs=count, address="tcp://127.0.0.1:*")


def test_environments_are_closed_if_the_address_is_in_use() -> None:
    ClosingEnv.closed.clear()
    with serving() as server, pytest.raises(ConfigError, match="in use"):
        EnvServer(name="x", make=ClosingEnv, num_envs=2, address=server.address)
    assert 2 == len(ClosingEnv.closed)


def test_a_signal_handler_can_stop_it() -> None:
    server = EnvServer(name="x", make=EchoEnv, num_envs=1, address="tcp://127.0.0.1:*")
    before = signal.signal(signal.SIGUSR1, lambda *_: server.stop())
    try:
        timer = threading.Timer(0.05, signal.raise_signal, (signal.SIGUSR1,))
        timer.start()
        server.serve()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
        server.close()


def test_what_can_be_sent_of_an_info_is_sent() -> None:
    dropped: Counter[str] = Counter()
    info: dict[Any, Any] = {"a": 1, "b": {1}, "c": {"d": object(), 5: "e"}, frozenset(): 3}
    assert {"a": 1, "c": {5: "e"}} == sendable(info, dropped)
    assert {"b": 1, "c/d": 1, "frozenset()": 1} == dropped
    endless: dict[str, Any] = {"x": 1}
    endless["self"] = endless
    found = sendable(endless, dropped)
    for _ in range(MAX_NESTED):
        found = found["self"]
    assert {"x": 1} == found


def test_a_single_environment_has_its_wrappers_and_arguments() -> None:
    wrapper = "tests.envs.test_server:wrapped"
    settings = EnvSettings(
        id="tests.support.remote_worlds:EchoEnv", kwargs={"length": 9}, wrappers=(wrapper,)
    )
    environment = make_single(settings)
    assert isinstance(environment, gymnasium.wrappers.RecordEpisodeStatistics)
    assert 9 == environment.unwrapped.length


def wrapped(environment: Any) -> Any:
    return gymnasium.wrappers.RecordEpisodeStatistics(environment)


def test_a_whole_vector_is_not_served() -> None:
    settings = EnvSettings(
        id="tianflow.envs.remote:RemoteVectorEnv", kwargs={"addresses": ["tcp://127.0.0.1:1"]}
    )
    with pytest.raises(ConfigError, match=r"env\.id = .*makes a whole vector"):
        make_single(settings)


def test_two_clients_share_a_server() -> None:
    with serving(num_envs=4) as server:
        vectors = [RemoteVectorEnv(2, [server.address]) for _ in range(2)]
        for seed, vector in enumerate(vectors):
            vector.reset(seed=seed)
        for turn in range(4):
            for vector in vectors:
                vector.send(np.full(2, turn))
            for vector in reversed(vectors):
                assert [float(turn)] * 2 == vector.receive().observation[:, 3].tolist()
        for vector in vectors:
            vector.close()
