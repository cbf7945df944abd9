"""Remote vector environments: Gymnasium's promises, rows in their places, and losses of servers."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from tests.e2e.harness import until
from tests.support.remote_worlds import EchoEnv, Relay, rows_out_of_place, serving
from tests.support.vector_conformance import MakeVector, VectorConformance
from tianflow.channels.frames import Message, encode
from tianflow.channels.keys import read_or_make_keys
from tianflow.channels.tcp import BYE, RefusedConnectionError, TcpListener
from tianflow.config.loading import load_config
from tianflow.envs import probe
from tianflow.envs.make import make
from tianflow.envs.remote import RemoteStatistics, RemoteVectorEnv
from tianflow.envs.remote_protocol import (
    FAILURE,
    HELLO,
    REFUSAL,
    RESULT,
    STEP,
    WELCOME,
    describe,
)
from tianflow.envs.server import EnvServer
from tianflow.errors import BrokenChannelError, ConfigError, EnvironmentFailedError


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
class TestVectorsOfGymnasiumConform(VectorConformance):
    """The suite itself: what it asks for is what Gymnasium's own vectors do."""

    @pytest.fixture
    def make_vector(self, request: pytest.FixtureRequest) -> Iterator[MakeVector]:
        # Only this one refuses calls once it is closed; it starts processes, which takes long.
        asynchronous = request.function.__name__ == "test_a_closed_vector_is_closed"
        with ExitStack() as stack:

            def make(
                environment: Callable[[], Any],
                count: int,
                mode: AutoresetMode = AutoresetMode.NEXT_STEP,
            ) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
                kind = AsyncVectorEnv if asynchronous else SyncVectorEnv
                vector = kind([environment] * count, autoreset_mode=mode)
                stack.callback(vector.close)
                return vector

            yield make


@pytest.mark.parametrize("servers", [1, 2], ids=["one server", "two servers"])
class TestRemoteVectorEnvConforms(VectorConformance):
    @pytest.fixture
    def make_vector(self, servers: int) -> Iterator[MakeVector]:
        with ExitStack() as stack:

            def make(
                environment: Callable[[], Any],
                count: int,
                mode: AutoresetMode = AutoresetMode.NEXT_STEP,
            ) -> RemoteVectorEnv:
                running = [stack.enter_context(serving(environment, count)) for _ in range(servers)]
                vector = RemoteVectorEnv(
                    count, [server.address for server in running], autoreset_mode=mode
                )
                stack.callback(vector.close)
                return vector

            yield make


# Rows in their places
# --------------------------------------------------------------------------------------------------


@contextmanager
def world(
    servers: int = 2, rows: int = 2, environment: Callable[[], Any] = EchoEnv, **arguments: Any
) -> Iterator[tuple[RemoteVectorEnv, list[Relay], list[EnvServer]]]:
    """A vector of ``servers`` times ``rows``, with a relay before each server."""
    with ExitStack() as stack:
        running = [stack.enter_context(serving(environment, rows)) for _ in range(servers)]
        relays = [stack.enter_context(Relay(server.address)) for server in running]
        vector = RemoteVectorEnv(
            servers * rows, [relay.address for relay in relays], **{**QUICK, **arguments}
        )
        stack.callback(vector.close)
        yield vector, relays, running


QUICK = {"reply_timeout_s": 30.0, "rejoin_timeout_s": 30.0}
ONES = np.ones(4, np.int64)


def test_rows_that_were_sent_first_or_last_are_received_in_order() -> None:
    with world() as (vector, *_):
        vector.reset(seed=1)
        vector.send(np.array([13, 11]), rows=[1, 3])
        vector.send(np.array([10, 12]), rows=[0, 2])
        received = vector.receive()
        assert [0, 1, 2, 3] == received.rows.tolist()
        assert [10, 13, 12, 11] == received.observation[:, 3].tolist()
        assert [True] * 4 == received.info["_number"].tolist()


def test_some_rows_can_go_on_while_others_have_not_arrived() -> None:
    with world() as (vector, relays, _):
        vector.reset(seed=1)
        relays[1].hang()
        vector.send(ONES)
        assert [0, 1] == vector.receive(at_least=1).rows.tolist()
        for t in (2, 3):
            vector.send(np.array([7, 8]), rows=[0, 1])
            received = vector.receive([0, 1])
            assert [[t, 7], [t, 8]] == received.observation[:, 2:].tolist()
            assert (2,) == received.reward.shape
        relays[1].flow()
        received = vector.receive()
        assert [2, 3] == received.rows.tolist()
        assert [1.0, 1.0] == received.reward.tolist()


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [-1], [4], [], [[0]], [0.0]])
def test_rows_have_to_be_ascending_indices(rows: Any) -> None:
    with world() as (vector, *_):
        vector.reset(seed=1)
        with pytest.raises(ValueError, match="ascending"):
            vector.send(np.ones(len(rows), np.int64), rows=rows)
        vector.send(ONES)
        with pytest.raises(ValueError, match="ascending"):
            vector.receive(rows)


def test_a_row_is_sent_once_and_received_once() -> None:
    with world() as (vector, *_):
        with pytest.raises(ResetNeeded):
            vector.step(ONES)
        vector.reset(seed=1)
        with pytest.raises(NoAsyncCallError):
            vector.receive()
        vector.send(ONES[:2], rows=[0, 2])
        with pytest.raises(AlreadyPendingCallError):
            vector.send(ONES[:2], rows=[2, 3])
        with pytest.raises(AlreadyPendingCallError):
            vector.reset()
        with pytest.raises(NoAsyncCallError):
            vector.receive([0, 1])
        with pytest.raises(ValueError, match="at_least = 3"):
            vector.receive(at_least=3)
        assert [0, 2] == vector.receive().rows.tolist()
        with pytest.raises(NoAsyncCallError):
            vector.receive([0])


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        (np.ones(3, np.int64), ValueError),
        (np.ones((4, 1), np.int64), ValueError),
        (np.ones(4), TypeError),
    ],
)
def test_actions_that_do_not_fit_are_refused_and_nothing_is_sent(
    actions: Any, error: type[Exception]
) -> None:
    with world() as (vector, *_):
        vector.reset(seed=1)
        with pytest.raises(error):
            vector.step(actions)
        assert [1.0] * 4 == vector.step(ONES)[1].tolist()


def test_actions_are_copied_before_they_are_sent() -> None:
    with world() as (vector, *_):
        actions = np.ones(4, np.int64)
        (split,) = vector._split(actions, 4)
        assert not np.shares_memory(actions, split)


class WideEnv(gymnasium.Env[Any, Any]):
    """Actions and observations larger than what a header or a copied frame holds."""

    SIZE = 50_000
    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Box(-9.0, 9.0, (SIZE,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._look(), {"mask": self.np_random.integers(0, 2, (60, 60)).astype(bool)}

    def step(self, action: Any) -> Any:
        return self._look(), float(action.sum()), False, False, {}

    def _look(self) -> Any:
        return self.np_random.integers(0, 256, (84, 84, 4), np.uint8)


def test_images_arrive_as_they_are_encrypted_or_not(tmp_path: Path) -> None:
    keys = read_or_make_keys(tmp_path / "keys")
    for given, path in ((None, None), (keys, str(tmp_path / "keys"))):
        with serving(WideEnv, 2, keys=given) as server:
            vector = RemoteVectorEnv(2, [server.address], key_file=path)
            alone = [WideEnv(), WideEnv()]
            observation, info = vector.reset(seed=3)
            for row, single in enumerate(alone):
                first, first_info = single.reset(seed=3 + row)
                assert np.array_equal(first, observation[row])
                assert np.array_equal(first_info["mask"], info["mask"][row])
            actions = np.zeros((2, WideEnv.SIZE), np.float32)
            for _ in range(5):
                observation = vector.step(actions)[0]
                for row, single in enumerate(alone):
                    assert np.array_equal(single.step(actions[row])[0], observation[row])
            vector.close()


def test_no_row_is_out_of_place_with_0_to_20_ms_of_jitter() -> None:
    assert (1000, 0) == rows_out_of_place(1000)


# Losses
# --------------------------------------------------------------------------------------------------


def lost_rows(info: dict[str, Any]) -> list[int]:
    return np.flatnonzero(info.get("_lost", np.zeros(0))).tolist()


@pytest.mark.parametrize("idle", [True, False], ids=["between two steps", "during a step"])
def test_next_step_a_lost_server_truncates_its_rows_and_rejoins_with_fresh_seeds(
    idle: bool,
) -> None:
    with world() as (vector, relays, servers):
        vector.reset(seed=1)
        before = vector.step(ONES)[0]
        if idle:
            relays[1].cut()
            vector.send(ONES)
        else:
            relays[1].hang()
            vector.send(ONES)
            relays[1].cut()
        received = vector.receive()
        assert [2, 3] == lost_rows(received.info)
        assert relays[1].address in received.info["lost"][2]
        assert np.array_equal(before[2:], received.observation[2:])
        assert [2.0, 2.0, 0.0, 0.0] == received.reward.tolist()
        assert [False, False, True, True] == received.truncated.tolist()
        assert not received.terminated.any()
        assert RemoteStatistics(1, 2, 0, 0) == vector.statistics()
        relays[1].flow()
        relays[1].target = servers[1].address
        observation, reward, _, truncated, info = vector.step(ONES)
        assert [3.0, 3.0, 0.0, 0.0] == reward.tolist() == observation[:, 2].tolist()
        assert not truncated.any()
        assert [] == lost_rows(info)
        assert set(observation[2:, 0]).isdisjoint(before[2:, 0])
        assert [4.0, 4.0, 1.0, 1.0] == vector.step(ONES)[1].tolist()
        assert RemoteStatistics(1, 2, 1, 0) == vector.statistics()


def test_fresh_seeds_follow_from_the_seed_of_the_reset() -> None:
    seen = []
    for _ in range(2):
        with world() as (vector, relays, servers):
            vector.reset(seed=11)
            relays[1].cut()
            vector.step(ONES)
            relays[1].target = servers[1].address
            seen.append(vector.step(ONES)[0][2:, 0].tolist())
    assert seen[0] == seen[1]
    assert seen[0] != [EchoEnv().reset(seed=11 + row)[0][0] for row in (2, 3)]


def test_a_row_that_was_only_to_be_reset_loses_nothing() -> None:
    with world(environment=lambda: EchoEnv(length=2)) as (vector, relays, servers):
        vector.reset(seed=1)
        vector.step(ONES)
        assert [True] * 4 == vector.step(ONES)[2].tolist()
        relays[0].cut()
        vector.send(ONES)
        relays[0].target = servers[0].address
        received = vector.receive()
        assert [0.0] * 4 == received.observation[:, 2].tolist() == received.reward.tolist()
        assert not received.truncated.any()
        assert RemoteStatistics(1, 0, 1, 0) == vector.statistics()


def test_same_step_a_lost_server_gives_the_next_episode_and_the_last_observation_known() -> None:
    mode = AutoresetMode.SAME_STEP
    with world(autoreset_mode=mode) as (vector, relays, servers):
        vector.reset(seed=1)
        before = vector.step(ONES)[0]
        relays[0].cut()
        vector.send(ONES)
        relays[0].target = servers[0].address
        observation, reward, terminated, truncated, info = vector.receive()[1:]
        assert [0.0, 0.0, 2.0, 2.0] == observation[:, 2].tolist() == reward.tolist()
        assert [True, True, False, False] == truncated.tolist()
        assert not terminated.any()
        assert [0, 1] == lost_rows(info)
        assert [True, True, False, False] == info["_final_obs"].tolist()
        assert np.array_equal(before[0], info["final_obs"][0])
        assert info["lost"][0] == info["final_info"]["lost"][0]
        assert "episode" in info
        assert [1.0, 1.0, 3.0, 3.0] == vector.step(ONES)[1].tolist()
        assert RemoteStatistics(1, 2, 1, 0) == vector.statistics()


def test_disabled_a_lost_row_waits_for_the_reset_of_the_caller() -> None:
    with world(autoreset_mode="Disabled") as (vector, relays, servers):
        vector.reset(seed=1)
        relays[0].cut()
        truncated, info = vector.step(ONES)[3:]
        assert [0, 1] == lost_rows(info)
        with pytest.raises(ResetNeeded):
            vector.step(ONES)
        relays[0].target = servers[0].address
        observation, _ = vector.reset(options={"reset_mask": truncated})
        assert [0.0, 0.0, 1.0, 1.0] == observation[:, 2].tolist()
        assert [1.0, 1.0, 2.0, 2.0] == vector.step(ONES)[1].tolist()


def test_a_reset_that_is_lost_is_sent_again_with_its_seeds() -> None:
    expected = [EchoEnv().reset(seed=5 + row)[0][0] for row in range(4)]
    with world() as (vector, relays, servers):
        relays[0].cut()
        again = threading.Timer(0.2, setattr, (relays[0], "target", servers[0].address))
        again.start()
        assert expected == vector.reset(seed=5)[0][:, 0].tolist()
        again.join()
        assert RemoteStatistics(1, 0, 1, 0) == vector.statistics()


def test_a_server_without_a_reply_is_given_up_and_joined_again_when_it_is_back() -> None:
    with world(reply_timeout_s=1.0) as (vector, relays, servers):
        vector.reset(seed=1)
        relays[1].hang()
        received = vector.step(ONES)
        assert [2, 3] == lost_rows(received[4])
        assert "did not reply within 1 s" in received[4]["lost"][3]
        relays[1].flow()
        assert [2.0, 2.0, 0.0, 0.0] == vector.step(ONES)[1].tolist()
        assert RemoteStatistics(1, 2, 1, 0) == vector.statistics()
        until("all are lent", lambda: servers[1].free == 0)


def test_heartbeats_find_a_machine_that_is_gone() -> None:
    with world(heartbeat_s=0.05) as (vector, relays, _):
        vector.reset(seed=1)
        relays[1].hang()
        began = time.monotonic()
        assert [2, 3] == lost_rows(vector.step(ONES)[4])
        assert time.monotonic() - began < QUICK["reply_timeout_s"] / 2
        relays[1].flow()


def test_with_on_lost_error_the_call_raises_and_a_reset_joins_again() -> None:
    with world(on_lost="error") as (vector, relays, servers):
        for idle in (True, False):
            vector.reset(seed=1)
            if not idle:
                relays[1].hang()
                vector.send(ONES)
            relays[1].cut()
            with pytest.raises(BrokenChannelError, match=r"rows 2 to 3") as caught:
                vector.step(ONES) if idle else vector.receive()
            assert relays[1].address in str(caught.value)
            with pytest.raises(ResetNeeded):
                vector.step(ONES)
            relays[1].flow()
            relays[1].target = servers[1].address
        vector.reset(seed=1)
        assert [1.0] * 4 == vector.step(ONES)[1].tolist()
        assert RemoteStatistics(2, 0, 2, 0) == vector.statistics()


def test_a_server_that_does_not_return_in_time_is_an_error() -> None:
    with world(rejoin_timeout_s=0.3) as (vector, relays, _):
        vector.reset(seed=1)
        relays[0].cut()
        vector.step(ONES)
        with pytest.raises(BrokenChannelError, match="not joined again within 0.3 s") as caught:
            vector.step(ONES)
        assert relays[0].address in str(caught.value)


def test_losses_cost_only_what_is_counted() -> None:
    """Servers die and return in turn: every row that is not counted follows the one before."""
    with world(servers=3, environment=lambda: EchoEnv(length=7)) as (vector, relays, servers):
        observation, _ = vector.reset(seed=1)
        before, over, counted = observation, np.zeros(6, bool), 0
        for step in range(60):
            if step % 10 == 5:
                relays[step // 10 % 3].cut()
            actions = np.arange(6) + 10 * step
            vector.send(actions)
            for relay, server in zip(relays, servers, strict=True):
                relay.target = server.address
            observation, _, terminated, truncated, info = vector.receive()[1:]
            lost = np.zeros(6, bool)
            lost[lost_rows(info)] = True
            counted += int(lost.sum())
            assert np.array_equal(lost, truncated)
            assert np.array_equal(before[lost], observation[lost])
            assert [-1.0] * int(over.sum()) == observation[over, 3].tolist()
            went_on = ~(lost | over)
            assert np.array_equal(actions[went_on], observation[went_on, 3])
            assert np.array_equal(before[went_on, :2], observation[went_on, :2])
            assert np.array_equal(before[went_on, 2] + 1, observation[went_on, 2])
            before, over = observation, terminated | truncated
        assert RemoteStatistics(6, counted, 6, 0) == vector.statistics()
        assert 6 <= counted <= 12


# What does not match
# --------------------------------------------------------------------------------------------------


def test_more_sub_environments_than_a_server_has_are_refused() -> None:
    with serving(num_envs=2) as server:
        with pytest.raises(
            RefusedConnectionError, match=r"asks for 3 .* has 2, of which 2"
        ) as found:
            RemoteVectorEnv(3, [server.address])
        assert server.address in str(found.value)
        assert 1 == server.statistics().refused


def test_sub_environments_are_lent_once_and_returned() -> None:
    with serving(num_envs=3) as server:
        first = RemoteVectorEnv(2, [server.address])
        with pytest.raises(RefusedConnectionError, match=r"asks for 2 .* has 3, of which 1"):
            RemoteVectorEnv(2, [server.address], connect_timeout_s=0.3)
        second = RemoteVectorEnv(1, [server.address])
        first.close()
        # The next client may be heard before the farewell: then the lease counts as abandoned.
        until("those of the first are returned", lambda: server.free == 2)
        third = RemoteVectorEnv(2, [server.address])
        until("all are lent", lambda: server.free == 0)
        del second, third
        gc.collect()
        until("all are returned", lambda: server.free == 3)
        assert (4 - 1, 0) == (server.statistics().welcomed, server.statistics().abandoned)


def test_a_client_that_dies_returns_what_it_has() -> None:
    with serving(num_envs=2) as server, Relay(server.address) as relay:
        vector = RemoteVectorEnv(2, [relay.address])
        relay.cut()
        until("all are returned", lambda: server.free == 2)
        assert 1 == server.statistics().abandoned
        vector.close()


def test_servers_with_different_spaces_are_refused() -> None:
    with serving(EchoEnv, 1) as first, serving(lambda: EchoEnv(size=5), 1) as second:
        with pytest.raises(
            RefusedConnectionError, match="observation spaces do not match"
        ) as found:
            RemoteVectorEnv(2, [first.address, second.address])
        for text in (first.address, second.address, "(4,)", "(5,)"):
            assert text in str(found.value)


def test_a_server_that_returns_with_other_spaces_is_refused() -> None:
    with serving(lambda: EchoEnv(size=5), 2) as other, world() as (vector, relays, _):
        vector.reset(seed=1)
        relays[1].cut()
        vector.step(ONES)
        relays[1].target = other.address
        with pytest.raises(
            RefusedConnectionError, match=r"has Box.*\(5,\).* before it had.*\(4,\)"
        ):
            vector.step(ONES)


def test_another_version_of_the_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setattr("tianflow.envs.remote.PROTOCOL", 2)
        with pytest.raises(RefusedConnectionError, match=r"client speaks version 2 .* 1$"):
            RemoteVectorEnv(1, [server.address])


def test_keys_that_do_not_match_are_refused(tmp_path: Path) -> None:
    mine, other = read_or_make_keys(tmp_path / "mine"), read_or_make_keys(tmp_path / "other")
    mixed = replace(mine, client_public=other.client_public, client_secret=other.client_secret)
    (tmp_path / "mixed").touch(0o600)
    fields = ("server_public", "server_secret", "client_public", "client_secret")
    lines = [f'{name} = "{getattr(mixed, name).decode()}"' for name in fields]
    (tmp_path / "mixed").write_text("\n".join(lines))
    with serving(keys=mine) as locked, serving() as unlocked:
        for address, name, text in (
            (locked.address, None, "this end has no key, {} (may )?requires? one"),
            (locked.address, "other", f"{other.fingerprint} .*other.*{{}} has no key, or another"),
            (locked.address, "mixed", "{} does not accept it for clients"),
            (unlocked.address, "mine", f"{mine.fingerprint} .*mine.*{{}} has n"),
        ):
            key_file = None if name is None else str(tmp_path / name)
            with pytest.raises(RefusedConnectionError, match=text.format(re.escape(address))):
                RemoteVectorEnv(1, [address], key_file=key_file, connect_timeout_s=0.5)
        vector = RemoteVectorEnv(1, [locked.address], key_file=str(tmp_path / "mine"))
        assert (1, EchoEnv().reset(seed=2)[0][0]) == (
            vector.num_envs,
            vector.reset(seed=2)[0][0, 0],
        )
        vector.close()
        assert 1 == locked.statistics().connections.refused_keys


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"addresses": []}, "addresses"),
        ({"addresses": "tcp://127.0.0.1:1"}, "addresses"),
        ({"addresses": ["127.0.0.1:1"]}, "addresses"),
        ({"addresses": ["tcp://127.0.0.1:*"]}, "addresses"),
        ({"addresses": ["tcp://127.0.0.1:99999"]}, "addresses"),
        ({"addresses": ["tcp://127.0.0.1:1"] * 2}, "addresses"),
        ({"addresses": ["tcp://192.0.2.1:1"]}, "addresses"),
        ({"num_envs": 0}, "num_envs"),
        ({"autoreset_mode": "Sometimes"}, "autoreset_mode"),
        ({"on_lost": "ignore"}, "on_lost"),
        ({"reply_timeout_s": 0}, "reply_timeout_s"),
        ({"rejoin_timeout_s": float("nan")}, "rejoin_timeout_s"),
        ({"heartbeat_s": -1.0}, "heartbeat_s"),
    ],
)
def test_arguments_that_are_not_valid_are_refused_by_name(
    arguments: dict[str, Any], path: str
) -> None:
    usual = {"num_envs": 1, "addresses": ["tcp://127.0.0.1:1"]}
    with pytest.raises(ConfigError) as found:
        RemoteVectorEnv(**{**usual, **arguments})
    assert [path] == [problem.path for problem in found.value.problems]


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(
        BrokenChannelError, match=r"tcp://127.0.0.1:1 was not joined within 0.2 s: tcp"
    ):
        RemoteVectorEnv(1, ["tcp://127.0.0.1:1"], connect_timeout_s=0.2)


def test_waiting_for_servers_that_are_not_there_uses_no_cpu() -> None:
    began = time.thread_time()
    with pytest.raises(BrokenChannelError, match="not joined within"):
        RemoteVectorEnv(1, ["tcp://127.0.0.1:1"], connect_timeout_s=0.4)
    assert time.thread_time() - began < 0.02


def test_a_server_that_starts_later_is_waited_for() -> None:
    with serving(num_envs=1) as server, Relay(None) as relay:
        again = threading.Timer(0.2, setattr, (relay, "target", server.address))
        again.start()
        vector = RemoteVectorEnv(1, [relay.address])
        again.join()
        vector.close()


@pytest.mark.parametrize("seed", [-1, 2**64, [1, 2, 3, -4]])
def test_seeds_that_no_environment_takes_are_refused(seed: Any) -> None:
    with world() as (vector, *_), pytest.raises(ValueError, match="seed"):
        vector.reset(seed=seed)


# Servers that violate the protocol
# --------------------------------------------------------------------------------------------------


def welcome_body() -> dict[str, Any]:
    environment = EchoEnv()
    return {
        "env": "echo",
        "observation_space": describe(environment.observation_space),
        "action_space": describe(environment.action_space),
        "metadata": {},
        "max_frame": 2**20,
    }


def result_body(kind: str) -> dict[str, Any]:
    """A valid result of two rows."""
    body = {"rows": [0, 1], "observation": [np.zeros((2, 4))], "infos": None}
    if kind == STEP:
        over = np.zeros((2, 2), np.bool_)
        body |= {"reward": np.zeros(2), "over": over, "ended": [], "final": None}
    return body


@contextmanager
def replying(reply: Callable[[Message], list[Any]]) -> Iterator[str]:
    """The address of a server that answers each message with ``reply``: frames to send."""
    listener, over = TcpListener("tcp://127.0.0.1:*"), threading.Event()

    def serve() -> None:
        while not over.is_set():
            found = listener.receive(0.05)
            if found is not None and found[1].kind != BYE:
                listener.send(found[0], reply(found[1]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.address
    finally:
        over.set()
        thread.join(20.0)
        listener.close()


WELCOMES: list[tuple[str, Any]] = [
    (RESULT, {}),
    (WELCOME, None),
    (WELCOME, {**welcome_body(), "env": 3}),
    (WELCOME, {**welcome_body(), "observation_space": ["cube"]}),
    (WELCOME, {**welcome_body(), "max_frame": "x"}),
    (REFUSAL, {"reason": 3, "again": False}),
    (REFUSAL, {"reason": "it is so"}),
]


@pytest.mark.parametrize(("kind", "body"), WELCOMES)
def test_a_server_with_a_malformed_welcome_is_not_joined(kind: str, body: Any) -> None:
    with (
        replying(lambda message: encode(kind, message.number, body)) as address,
        pytest.raises(BrokenChannelError, match="not joined within 0.2 s.*malformed"),
    ):
        RemoteVectorEnv(2, [address], connect_timeout_s=0.2)


def test_valid_replies_of_any_server_are_accepted() -> None:
    """The replies that the malformed ones below are made of."""

    def reply(message: Message) -> list[Any]:
        if message.kind == HELLO:
            return encode(WELCOME, message.number, welcome_body())
        return encode(RESULT, message.number, result_body(message.kind))

    with replying(reply) as address:
        vector = RemoteVectorEnv(2, [address])
        vector.reset()
        assert [0.0, 0.0] == vector.step(ONES[:2])[1].tolist()
        vector.close()


RESULTS: list[dict[str, Any]] = [
    {"rows": [0]},
    {"rows": [1, 0]},
    {"rows": [0, 2]},
    {"observation": None},
    {"observation": []},
    {"observation": [np.zeros((2, 3))]},
    {"observation": [np.zeros((1, 4))]},
    {"observation": [np.zeros((2, 4), np.float32)]},
    {"infos": [{}]},
    {"infos": [{}, None]},
    {"infos": {}},
    {"reward": np.zeros(1)},
    {"reward": np.zeros(2, np.float32)},
    {"reward": [0.0, 0.0]},
    {"over": np.zeros((2, 2), np.uint8)},
    {"over": np.zeros(2, np.bool_)},
    {"ended": [2], "final": [np.zeros((1, 4))]},
    {"ended": [0], "final": None},
    {"ended": [0], "final": [np.zeros((2, 4))]},
    {"kind": "nonsense"},
    {"kind": WELCOME},
    {"kind": FAILURE},
    {"number": 99},
    {"number": 0},
    {"frames": [b"nonsense"]},
]


@pytest.mark.parametrize("change", RESULTS, ids=str)
def test_a_malformed_result_is_the_loss_of_its_server(change: dict[str, Any]) -> None:
    def reply(message: Message) -> list[Any]:
        if message.kind == HELLO:
            return encode(WELCOME, message.number, welcome_body())
        body, kind, number = result_body(message.kind), RESULT, message.number
        if message.kind == STEP:
            body |= change
            kind, number = body.pop("kind", kind), body.pop("number", number)
            if "frames" in body:
                return list(body["frames"])
        return encode(kind, number, body)

    with replying(reply) as address:
        vector = RemoteVectorEnv(2, [address], on_lost="error")
        vector.reset()
        with pytest.raises(BrokenChannelError, match="malformed"):
            vector.step(ONES[:2])
        assert RemoteStatistics(1, 0, 0, 1) == vector.statistics()
        vector.close()


# What environments do
# --------------------------------------------------------------------------------------------------


class FragileEnv(EchoEnv):
    """Action 0 breaks it; a broken one cannot be reset."""

    broken = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert not self.broken
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if action == 0:
            self.broken = True
            raise RuntimeError("it broke")
        return super().step(action)


def test_an_environment_that_raises_is_named_and_made_again() -> None:
    with world(environment=FragileEnv) as (vector, _, servers):
        vector.reset(seed=1)
        with pytest.raises(
            EnvironmentFailedError, match=r"sub-environment 3 at .*it broke"
        ) as found:
            vector.step(np.array([1, 1, 1, 0]))
        assert "raise RuntimeError" in found.value.details
        with pytest.raises(ResetNeeded):
            vector.step(ONES)
        vector.reset(seed=1)
        assert [1.0] * 4 == vector.step(ONES)[1].tolist()
        assert RemoteStatistics(0, 0, 0, 0) == vector.statistics()
        assert 1 == servers[1].statistics().failures


class WrongShapeEnv(EchoEnv):
    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return (observation[:3], *others)


def test_an_observation_of_another_shape_is_an_error() -> None:
    with world(environment=WrongShapeEnv) as (vector, *_):
        vector.reset(seed=1)
        with pytest.raises(EnvironmentFailedError, match=r"shape \(3,\) instead of \(4,\)"):
            vector.step(ONES)


class TalkativeEnv(EchoEnv):
    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        return (*result, {"number": 1, "object": object(), "in": {"set": {1}, "number": 2}})


def test_entries_of_infos_that_cannot_be_sent_are_dropped_and_counted() -> None:
    with world(servers=1, environment=TalkativeEnv) as (vector, _, servers):
        vector.reset(seed=1)
        info = vector.step(ONES[:2])[4]
        assert {"number", "_number", "in", "_in"} == set(info)
        assert [2, 2] == info["in"]["number"].tolist()
        assert 4 == servers[0].statistics().infos_dropped


class MoodyEnv(EchoEnv):
    """Infos whose entries have another type, shape or depth in each environment and step."""

    KINDS = (1, "text", np.zeros(2), np.zeros(3), {"in": 1}, {"in": "text"}, None, [1])

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        return (*result, {"mood": self.KINDS[action % len(self.KINDS)]})


def test_infos_that_gymnasium_cannot_combine_become_objects() -> None:
    with world(environment=lambda: MoodyEnv(length=999)) as (vector, *_):
        vector.reset(seed=1)
        chance = np.random.default_rng(1)
        for _ in range(100):
            assert "mood" in vector.step(chance.integers(0, 8, 4))[4]
        assert [None, "text", 1, "text"] == vector.step(np.array([6, 1, 0, 1]))[4]["mood"].tolist()
        mood = vector.step(np.array([2, 4, 3, 1]))[4]["mood"]
        assert [[0.0, 0.0], {"in": 1}, [0.0, 0.0, 0.0], "text"] == [
            one.tolist() if isinstance(one, np.ndarray) else one for one in mood
        ]


class VerboseEnv(EchoEnv):
    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        return (*result, {"text": "x" * 700_000})


def test_infos_that_are_too_large_together_are_dropped_and_counted() -> None:
    with world(servers=1, environment=VerboseEnv) as (vector, _, servers):
        vector.reset(seed=1)
        assert {} == vector.step(ONES[:2])[4]
        assert 1 == servers[0].statistics().infos_dropped


def test_options_that_are_not_plain_data_are_refused() -> None:
    with world() as (vector, *_):
        with pytest.raises(TypeError, match="object"):
            vector.reset(options={"level": object()})
        vector.reset(seed=1)
        assert [1.0] * 4 == vector.step(ONES)[1].tolist()


# In tianflow
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_config_names_it_as_its_environment(mode: AutoresetMode) -> None:
    with serving(num_envs=4) as first, serving(num_envs=4) as second:
        kwargs = {"addresses": [first.address, second.address], "autoreset_mode": mode.value}
        overrides = [
            "env.id=tianflow.envs.remote:RemoteVectorEnv",
            "env.num_envs=4",
            "algorithm.minibatch_size=32",
        ]
        config = load_config("cartpole_ppo", overrides)
        settings = config.env.model_copy(update={"kwargs": kwargs})
        spec = probe(config.model_copy(update={"env": settings}))
        assert (4, "discrete") == (spec.num_envs, spec.action.kind)
        environment = make(settings)
        observation = {"": np.zeros((4, 4), np.float32)}
        environment.reset(3, observation, None)
        assert [EchoEnv().reset(seed=3 + row)[0][0] for row in range(4)] == observation[""][
            :, 0
        ].tolist()
        environment.close()
        until("all are returned", lambda: (first.free, second.free) == (4, 4))
