"""Settings that have an effect on training, of every algorithm and of damaged tables."""

from __future__ import annotations

from typing import Any

import pytest

from tianflow.config.model import BUILT_IN_ALGORITHMS, Config, EnvSettings
from tianflow.config.relevance import relevant


def tables(algorithm: str, **sections: Any) -> dict[str, Any]:
    model = BUILT_IN_ALGORITHMS[algorithm]
    config = Config(
        env=EnvSettings(id="-"), algorithm=model.model_validate({"name": algorithm}), **sections
    )
    return config.model_dump(mode="json")


@pytest.mark.parametrize("algorithm", BUILT_IN_ALGORITHMS)
def test_replay_has_an_effect_exactly_for_algorithms_with_replay(algorithm: str) -> None:
    found = relevant(tables(algorithm))
    with_replay = (
        BUILT_IN_ALGORITHMS[algorithm].model_validate({"name": algorithm}).window is not None
    )
    assert with_replay == ("replay" in found)
    assert algorithm == found["algorithm"]["name"]


def test_inference_has_an_effect_with_servers_only() -> None:
    assert "inference" not in relevant(tables("ppo"))
    assert "inference" in relevant(tables("ppo", actors={"inference": "central"}))


def test_nodes_have_an_effect_with_their_launcher_only() -> None:
    assert "cluster" not in relevant(tables("ppo"))
    assert "cluster" in relevant(tables("ppo", placement={"launcher": "nodes"}))


def test_addresses_and_arguments_of_sinks_are_omitted() -> None:
    whole = tables("ppo", metrics={"kwargs": {"wandb": {"key": "private"}}})
    found = relevant(whole)
    assert set(whole) - set(found) == {
        *("http", "metrics", "ray", "slurm"),
        *("cluster", "replay", "inference"),
    }
    assert "private" not in str(found)


def test_an_unknown_algorithm_may_use_replay() -> None:
    assert {"algorithm": {"name": "mine:Own"}, "replay": {"beta": 1}} == relevant(
        {"algorithm": {"name": "mine:Own"}, "replay": {"beta": 1}}
    )


@pytest.mark.parametrize(
    "damaged", [{}, {"algorithm": 1}, {"algorithm": {"name": []}, "actors": []}]
)
def test_damaged_tables_are_not_an_error(damaged: dict[str, Any]) -> None:
    assert set(relevant(damaged)) <= {"algorithm"}
