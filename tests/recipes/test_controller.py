"""The recipe for a balance controller: one file and one entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.package import UserPackage
from tests.recipes.training import UPDATES, train
from tianflow.config.loading import load_config
from tianflow.errors import ConfigError
from tianflow.testing import ControllerConformance

HALVED = '''
    """Controller ``halved``: half of the bound, and the credits that it allows."""

    from tianflow.core.directives import SetBound, SetCredits
    from tianflow.core.events import Observed


    class Halved:
        def __init__(self, *, share: float = 0.5):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"share = {share}; accepted: 0 to 1")
            self._share = share

        def handle(self, event):
            if not isinstance(event, Observed) or event.max_staleness is None:
                return ()
            bound = int(self._share * event.max_staleness)
            credits = max(1, bound + 1 - event.publish_lag) * event.batch
            return SetBound(bound), SetCredits(credits)
'''


@pytest.fixture
def installed(user_package: UserPackage) -> UserPackage:
    user_package.write("halved", HALVED)
    user_package.entry_point("tianflow.controllers", "halved", "halved:Halved")
    return user_package


def test_an_installed_controller_sets_the_bound_of_a_run(
    installed: UserPackage, tmp_path: Path
) -> None:
    balance = {"controller": "halved", "max_staleness": 8, "parameters": {"share": 0.25}}
    summary = train(tmp_path, balance=balance).summary
    assert (UPDATES, 2, 0) == (
        summary["updates"],
        summary["staleness"]["bound"],
        summary["staleness"]["violations"],
    )
    assert summary["staleness"]["max"] <= 2


@pytest.mark.parametrize("share", [-0.5, 1.5])
def test_validation_reports_a_value_that_its_constructor_refuses(
    installed: UserPackage, share: float
) -> None:
    balance = {"controller": "halved", "parameters": {"share": share}}
    tables = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}, "balance": balance}
    said = f"balance.parameters = {{'share': {share}}}: halved: share = {share}; accepted: 0 to 1"
    with pytest.raises(ConfigError) as caught:
        load_config(tables)
    assert [said] == [str(problem) for problem in caught.value.problems]


CHECKS = sorted(name for name in dir(ControllerConformance) if name.startswith("test_"))


@pytest.mark.parametrize("check", CHECKS)
def test_it_passes_the_shipped_suite(installed: UserPackage, check: str) -> None:
    class TestHalved(ControllerConformance):
        make = installed.load("halved").Halved

    getattr(TestHalved(), check)()
