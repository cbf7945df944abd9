"""A host process finds its transport by an entry point, and makes the ends of its components."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.settings import cartpole
from tianflow.channels.shm import SharedTransport
from tianflow.core.payloads import Version
from tianflow.core.program import ComponentSpec, HostPlan, HostSpec
from tianflow.errors import ConfigError
from tianflow.hosts.main import LinkEnds, attach
from tianflow.planning.layouts import trajectory_layout
from tianflow.planning.validation import require_valid


def plan() -> HostPlan:
    config = cartpole()
    spec = require_valid(config).spec
    assert spec is not None
    host = HostSpec("learner", (ComponentSpec("learner", "learner"),))
    layout = trajectory_layout(config, spec)
    return HostPlan(host=host, spec=spec, layout=layout, start=Version(1, 0))


def test_an_address_begins_with_the_name_of_an_installed_transport() -> None:
    with pytest.raises(ConfigError, match="'shn': is not an installed name.*shm"):
        attach("shn://somewhere", (), plan())


def test_the_shared_memory_transport_is_installed() -> None:
    assert "shm" == SharedTransport.address.partition("://")[0]
    with pytest.raises(ValueError, match="not enough values"):
        attach(SharedTransport.address, (), plan())


def test_an_actor_that_comes_again_has_another_end() -> None:
    """So a grant that is on its way to the end before goes back."""
    transport, nothing = SimpleNamespace(arena=None, draws=None), cast("Any", None)
    ends = LinkEnds(plan=plan(), settings=nothing, transport=cast("Any", transport), link=nothing)
    assert 3 == len({ends.sender("actor-0")._end for _ in range(3)})
