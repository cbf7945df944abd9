"""Servers of environments as processes: they are killed, stopped and started again under a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.e2e import harness
from tests.e2e.harness import ROOT, until
from tianflow.channels.tcp import RefusedConnectionError
from tianflow.envs.remote import RemoteVectorEnv

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
REMOTE = "tianflow.envs.remote:RemoteVectorEnv"


@dataclass
class LiveServer:
    """``tianflow env-server`` as a child process."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def address(self) -> str:
        return self.text.partition("listening at ")[2].partition(": ")[0]


@contextmanager
def server(
    folder: Path, *arguments: str, env: str = "CartPole-v1", listen: str = "tcp://127.0.0.1:*"
) -> Iterator[LiveServer]:
    """A server that listens."""
    output = folder / f"server-{len(list(folder.iterdir()))}.log"
    command = [sys.executable, "-m", "tianflow", "env-server", env, "--listen", listen, *arguments]
    path = os.pathsep.join((str(ROOT), str(ROOT / "controllers")))
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=file, stderr=file
        )
    made = LiveServer(process, output)
    try:
        until("it listens, or has ended", lambda: made.address or process.poll() is not None)
        yield made
    finally:
        process.kill()
        process.wait()


paced = partial(server, env="tests.support.environments:PacedEnv")
"""A server for a run, which leaves the cores to others."""


def ended(made: LiveServer, number: int = signal.SIGTERM) -> tuple[int, str]:
    """Exit code and last line of a server that gets a signal."""
    made.process.send_signal(number)
    return made.process.wait(harness.PATIENCE_S), made.text.splitlines()[-1]


def episodes(vector: RemoteVectorEnv, steps: int, over: Any) -> tuple[int, int]:
    """Step at random: rows that hold a loss, and rows whose reward is not that of CartPole.

    ``over`` [N] holds which rows are only reset by the next step; it is updated.
    """
    lost = wrong = 0
    for _ in range(steps):
        _, reward, terminated, truncated, info = vector.step(vector.action_space.sample())
        gone = info.get("_lost", np.zeros(vector.num_envs, np.bool_))
        lost += int(gone.sum())
        wrong += int((reward != np.where(over | gone, 0.0, 1.0)).sum())
        over[:] = terminated | truncated
    return lost, wrong


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_with_a_summary(tmp_path: Path, number: int) -> None:
    with server(tmp_path, "--num-envs", "3", "render_mode=rgb_array") as one:
        vector = RemoteVectorEnv(2, [one.address])
        vector.reset(seed=1)
        vector.close()
        assert ": 3 environments, no key" in one.text
        code, summary = ended(one, number)
        assert 128 + number == code
        assert summary.startswith("2 steps for 1 clients; 0 clients lost, 0 refused; 1 connections")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--listen", "tcp://0.0.0.0:*"], "leaves this machine without a key"),
        (["--listen", "0.0.0.0:1"], "is not a valid address"),
        (["--num-envs", "5000"], "1 to 1024"),
        (["--key-file", "open"], "chmod 600"),
        (["lenght=3"], "unexpected keyword argument 'lenght'"),
        (["--wrapper", "nowhere:wrap"], "nowhere"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(
    tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "open").write_text("")
    (tmp_path / "open").chmod(0o644)
    with server(tmp_path, *arguments) as one:
        assert one.process.wait(harness.PATIENCE_S) in (1, 2)
        assert text in one.text
        assert "Traceback" not in one.text or "lenght" in one.text


def test_off_loopback_it_needs_a_key_that_the_client_has(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    arguments = ("--key-file", str(keys), "--num-envs", "2")
    with server(tmp_path, *arguments, listen="tcp://0.0.0.0:*") as one:
        assert 0o600 == keys.stat().st_mode & 0o777
        address = one.address.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(RefusedConnectionError):
            RemoteVectorEnv(2, [address], connect_timeout_s=1.0)
        vector = RemoteVectorEnv(2, [address], key_file=str(keys))
        expected = [gymnasium.make("CartPole-v1").reset(seed=1 + row)[0] for row in range(2)]
        assert np.array_equal(expected, vector.reset(seed=1)[0])
        vector.close()


def test_kill_hang_and_return_of_servers_lose_only_what_is_counted(tmp_path: Path) -> None:
    with server(tmp_path) as first, server(tmp_path) as second:
        vector = RemoteVectorEnv(
            8, [first.address, second.address], reply_timeout_s=2.0, rejoin_timeout_s=60.0
        )
        vector.reset(seed=1)
        vector.action_space.seed(1)
        over = np.zeros(8, np.bool_)
        total = np.array(episodes(vector, 200, over))
        assert [0, 0] == total.tolist()
        second.process.kill()
        second.process.wait()
        with server(tmp_path, listen=second.address) as again:
            total += episodes(vector, 200, over)
            again.process.send_signal(signal.SIGSTOP)
            goes_on = threading.Timer(4.0, again.process.send_signal, (signal.SIGCONT,))
            goes_on.start()
            total += episodes(vector, 200, over)
            goes_on.join()
            statistics = vector.statistics()
            assert (2, 2) == (statistics.servers_lost, statistics.rejoined)
            assert [statistics.rows_lost, 0] == total.tolist()
            assert 0 < statistics.rows_lost <= 8
            vector.close()


def test_a_run_trains_through_the_death_of_a_server(tmp_path: Path) -> None:
    with paced(tmp_path) as first, paced(tmp_path) as second:
        kwargs = {"addresses": [first.address, second.address]}
        settings: dict[str, Any] = {"env__num_envs": 4, "actors__count": 2}
        with harness.run(tmp_path / "runs", env__id=REMOTE, env__kwargs=kwargs, **settings) as live:
            live.until_training(more=5)
            address = second.address
            second.process.kill()
            second.process.wait()
            with paced(tmp_path, listen=address):
                live.until_training(more=20)
                assert 0.0 == live.restarts()
                assert 0.0 == live.metric("trajectories_dropped_total", "env_error")
                assert 0.0 == live.metrics()["staleness_violations_total",]
                assert 130 == live.interrupt()
        code, summary = ended(first)
        assert 128 + signal.SIGTERM == code
        assert ", 0 refused" in summary
