"""What stands below a setting in the source is told with its schema."""

from __future__ import annotations

import pytest
from pydantic import Field, create_model

from tianflow.config.model import BUILT_IN_ALGORITHMS, Config, EnvSettings, live_of
from tianflow.config.off_policy import DQNSettings
from tianflow.server.common.docstrings import of_fields
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
    texts = of_fields(Documented)
    assert "Of the second, on two lines." == texts["second"]
    assert "first" not in texts
    assert ("Overwritten.", of_fields(DQNSettings)["epsilon_updates"]) == (
        texts["learning_rate"],
        texts["epsilon_updates"],
    )


def test_a_model_without_source_has_no_texts_but_those_of_its_bases() -> None:
    made = create_model("Made", __base__=DQNSettings, more=(int, 1))
    assert of_fields(DQNSettings) == of_fields(made)


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
