"""The recipe for a network: one file and one entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.package import UserPackage
from tests.recipes.training import UPDATES, train
from tests.support.pages import DOCS, blocks

WIDE = '''
    """One wide hidden layer for policy and value."""

    import math

    import torch
    from tianflow.networks import Network, Output
    from tianflow.ops.distributions import distribution_for


    class Wide(Network):
        def __init__(self, settings, spec):
            super().__init__()
            inputs = sum(math.prod(leaf.shape) for leaf in spec.observation)
            self.hidden = torch.nn.Linear(inputs, settings.kwargs["units"])
            self.policy = torch.nn.Linear(
                settings.kwargs["units"], distribution_for(spec.action).size
            )
            self.value = torch.nn.Linear(settings.kwargs["units"], 1)

        def forward(self, observation, state, start):
            leaves = [leaf.flatten(2).float() for leaf in observation.values()]
            features = torch.relu(self.hidden(torch.cat(leaves, -1)))
            return Output(self.policy(features), self.value(features).squeeze(-1), state)
'''


@pytest.fixture
def installed(user_package: UserPackage) -> None:
    user_package.write("wide", WIDE)
    user_package.entry_point("tianflow.networks", "wide", "wide:Wide")


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_an_installed_network_trains_by_its_name(
    installed: None, algorithm: str, tmp_path: Path
) -> None:
    finished = train(
        tmp_path,
        algorithm={"name": algorithm},
        network={"name": "wide", "kwargs": {"units": 24}},
    )
    assert UPDATES == finished.summary["updates"]
    assert (24, 4) in {entry.shape for entry in finished.policy.policy.table.entries}


PAGE = (DOCS / "own-network.md").read_text(encoding="utf-8")
FILES = {block.name: block.text for block in blocks(PAGE) if block.name.endswith(".py")}


@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("name", ["wide:Wide", "recent:Recent"])
def test_a_network_of_the_page_acts_in_discrete_and_in_continuous_spaces(
    user_package: UserPackage, tmp_path: Path, name: str, environment: str
) -> None:
    module, _, _ = name.partition(":")
    user_package.write(module, FILES[f"{module}.py"])
    finished = train(tmp_path, network={"name": name}, env={"id": environment})
    assert UPDATES == finished.summary["updates"]
