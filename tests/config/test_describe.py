"""Every setting has a meaning: the docstring below its field, in the CLI and in the schema."""

from __future__ import annotations

import pytest
from pydantic import Field, create_model

from tianflow.config.describe import accepted, find, meanings
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config, EnvSettings, live_of
from tianflow.config.off_policy import DQNSettings
from tianflow.server.common.live_settings import RESOURCES
from tianflow.server.common.schemas import settings_patch, settings_read


class Documented(DQNSettings):
    first: int = 1
    second: int = Field(default=2)
    """Of the second,
    on two lines."""
    learning_rate: float = 1.0
    """Overwritten."""


def test_a_text_belongs_to_the_field_above_it_and_to_those_that_inherit_it() -> None:
    texts = meanings(Documented)
    assert "Of the second, on two lines." == texts["second"]
    assert "first" not in texts
    assert ("Overwritten.", meanings(DQNSettings)["epsilon_updates"]) == (
        texts["learning_rate"],
        texts["epsilon_updates"],
    )


def test_a_model_without_source_has_only_the_texts_of_its_bases() -> None:
    made = create_model("Made", __base__=DQNSettings, more=(int, 1))
    assert meanings(DQNSettings) == meanings(made)


@pytest.mark.parametrize("name", BUILT_IN_ALGORITHMS)
def test_live_settings_of_every_part_but_the_algorithm_are_explained(name: str) -> None:
    config = Config(
        env=EnvSettings(id="CartPole-v1"),
        algorithm=BUILT_IN_ALGORITHMS[name].model_validate({"name": name}),
    )
    mine = set(live_of(config)["algorithm"]) - {
        "learning_rate",
        "entropy_cost",
        "batch_trajectories",
    }
    for resource in RESOURCES:
        for key, schema in settings_read(config, resource)["properties"].items():
            assert schema.get("description") or key in mine, key
        assert "description" in str(settings_patch(config, resource))


@pytest.mark.parametrize("name", [*Config.model_fields, *BUILT_IN_ALGORITHMS])
def test_every_setting_says_what_it_is(name: str) -> None:
    assert [] == [setting.path for setting in find(name) if not setting.meaning]


def test_tables_inside_a_section_have_paths_of_their_own() -> None:
    paths = {setting.path for setting in find("env")}

    assert "env.normalisation.returns" in paths
    assert {path for path in paths if "normalisation" in path} == {
        setting.path for setting in find("env.normalisation")
    }


def test_an_algorithm_is_told_of_with_what_only_it_has() -> None:
    assert "algorithm.clip" in {setting.path for setting in find("ppo")}
    assert "algorithm.clip" not in {setting.path for setting in find("algorithm")}
    assert ["algorithm.clip"] == [
        setting.path for setting in find("clip") if setting.path.startswith("algorithm")
    ]


def test_what_two_algorithms_have_by_other_defaults_is_told_once() -> None:
    assert 1 == len(find("discount"))


def test_what_a_setting_takes_is_said_in_words() -> None:
    assert "whole number from 0 to 4096" == accepted(
        {"type": "integer", "minimum": 0, "maximum": 4096}
    )
    assert "number above 0" == accepted(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}
    )
    assert "a, b" == accepted({"enum": ["a", "b"], "type": "string"})
    assert "list of text" == accepted({"type": "array", "items": {"type": "string"}})
