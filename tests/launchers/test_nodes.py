"""The gateway that a run starts: with keys, unless the settings say otherwise. The hosts: each with
a plan for the machine that it is on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from tests.support.replay_exchange_worlds import DRAWS, LAYOUT, SPEC
from tests.support.settings import cartpole
from tests.support.worlds import small_layout
from tianflow.channels.keys import KEY_FIELDS
from tianflow.channels.latest import LatestCell
from tianflow.channels.messages import MESSAGES, StartGateway
from tianflow.channels.shm import SharedTransport
from tianflow.config.model import ClusterSettings
from tianflow.core.payloads import Version
from tianflow.core.program import ComponentSpec, HostPlan, HostSpec, Role
from tianflow.interfaces import LiveSettings, RunView
from tianflow.launchers import nodes as launcher
from tianflow.launchers.host_forker import HostForker
from tianflow.launchers.hub import NodeHub
from tianflow.launchers.nodes import GatewayKeeper

WARNING = "connections are neither encrypted nor authenticated"


def started(folder: Path, **settings: object) -> StartGateway:
    """What the gateway of a run with these settings of ``cluster`` starts with."""
    cluster = ClusterSettings.model_validate(settings)
    config = cartpole().model_copy(update={"cluster": cluster})
    live = LiveSettings(config, 1, paused=False, hold_learner=False)
    found: list[StartGateway] = []

    async def spawn(_: str, __: str, payload: bytes, ___: Sequence[int]) -> Any:
        found.append(MESSAGES.decode(msgpack.unpackb(payload, strict_map_key=False)))
        return SimpleNamespace(wait=asyncio.Event().wait, kill=lambda: None)

    async def run() -> None:
        slots = SharedTransport(layout=small_layout(), capacity=1)
        view = SimpleNamespace(id="r", settings=LatestCell(live, 0), directory=folder)
        keeper = GatewayKeeper(
            run=cast("RunView", view),
            slots=slots,
            forker=cast("HostForker", SimpleNamespace(spawn=spawn)),
            hub=cast("NodeHub", SimpleNamespace(shut=lambda: None)),
        )
        keeping = asyncio.create_task(keeper.run())
        while not found and not keeping.done():  # noqa: ASYNC110 - of a call, not of an event
            await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        slots.close()

    asyncio.run(run())
    (start,) = found
    return start


@pytest.mark.parametrize("listen", ["tcp://*:*", "tcp://127.0.0.1:*"])
def test_a_gateway_has_keys_of_its_own_wherever_it_listens(
    listen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (started(tmp_path, listen=listen) for _ in range(2))
    assert set(one.keys) == set(KEY_FIELDS)
    assert all(one.keys[name] != other.keys[name] for name in KEY_FIELDS)
    assert WARNING not in caplog.text


@pytest.mark.parametrize(
    ("listen", "warns"), [("tcp://*:*", True), ("tcp://10.0.0.1:9", True), ("tcp://[::1]:*", False)]
)
def test_a_gateway_without_keys_off_loopback_needs_a_setting_and_warns(
    listen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, warns: bool
) -> None:
    assert started(tmp_path, listen=listen, curve=False).keys == {}
    assert (WARNING in caplog.text) == warns


class FakeHost:
    """What a launcher starts a host with."""

    def __init__(self, *, plan: HostPlan, process: object = None, **_: object) -> None:
        self.plan, self.elsewhere = plan, process is not None

    async def start(self, *_: object) -> None: ...

    def follow_node(self) -> None: ...


@pytest.mark.parametrize(
    ("role", "seat", "draws", "elsewhere"),
    [
        ("replay", None, True, False),
        ("replay", "a node with draws", True, True),
        ("actor", "a node with draws", True, True),
        ("actor", "a node", False, True),
        ("evaluator", None, True, False),
    ],
)
def test_a_host_has_a_plan_for_the_machine_that_it_is_on(
    role: Role, seat: str | None, draws: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of cores are those of the head. Hosts of a node map draws if the node has some."""
    monkeypatch.setattr(launcher, "RemoteHost", FakeHost)
    monkeypatch.setattr(launcher, "NodeHost", FakeHost)

    async def plan_host(host: HostSpec, incarnation: int) -> HostPlan:
        return HostPlan(host, SPEC, LAYOUT, Version(1, 0), draws=DRAWS, incarnation=incarnation)

    async def place(_: str) -> object:
        assert role in ("replay", "actor")
        has_draws = seat == "a node with draws"
        found = SimpleNamespace(has_draws=has_draws, process=object(), start=None, release=None)
        return None if seat is None else found

    async def run() -> Any:
        # The learner works, as for each role but a shard.
        monkeypatch.setattr(asyncio.Event, "wait", lambda _: asyncio.sleep(0))
        start = launcher._starter(
            cast("Any", SimpleNamespace(plan_host=plan_host)),
            cast("Any", None),
            cast("Any", None),
            cast("Any", SimpleNamespace(place=place, place_shard=place)),
        )
        return await start(HostSpec("a-host", (ComponentSpec("a-0", role),), cores=(3,)), 2)

    host = asyncio.run(run())
    assert elsewhere == host.elsewhere
    assert (() if elsewhere else (3,)) == host.plan.host.cores
    assert (DRAWS if draws else None) == host.plan.draws
