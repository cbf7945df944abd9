"""The recipe for a metric: one field of a statistics dataclass, filled by its component."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recipes.repository import Repository

FIELD = """    wrappings: float = field(
        metadata=metric("Twice the actor's trajectories.", kind="counter", name="actor_wrappings")
    )
"""


def value(text: str, name: str) -> float:
    (found,) = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
    return float(found)


@pytest.mark.e2e
def test_a_field_that_a_component_fills_is_exported(tmp_path: Path) -> None:
    copy = Repository(tmp_path)
    copy.edit(
        "tianflow/core/statistics.py",
        'class ActorMeasures:\n    """Counts and times of an actor."""\n\n',
        FIELD,
    )
    copy.edit(
        "tianflow/components/actor.py",
        "            ActorMeasures(\n",
        '                wrappings=2.0 * self._counters["trajectories"],\n',
    )
    ((status, text),) = copy.serve("/metrics").values()
    assert 200 == status
    assert "# HELP tianflow_actor_wrappings_total Twice the actor's trajectories.\n" in text
    assert "# TYPE tianflow_actor_wrappings_total counter\n" in text
    trajectories = value(text, "tianflow_actor_trajectories_total")
    assert 0.0 < 2.0 * trajectories == value(text, "tianflow_actor_wrappings_total")
