"""A resume is checked against its checkpoint before anything of the run changes."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from tests.support.settings import cartpole
from tianflow.config import spaces
from tianflow.config.loading import load_config
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec, LeafSpec
from tianflow.planning.resuming import (
    check_resume,
    older_defaults,
    read_environment,
    saved_settings,
)
from tianflow.planning.validation import require_valid

BEFORE = cartpole()
SPEC = require_valid(BEFORE).spec
assert SPEC is not None
BOX = replace(
    SPEC,
    action=replace(
        SPEC.action, kind="box", shape=(2,), dtype="float32", low=(-inf, 0.0), high=(1.0, inf)
    ),
)


def manifest(config: Config = BEFORE, spec: EnvironmentSpec | None = SPEC) -> dict[str, Any]:
    environment = {} if spec is None else {"environment": spaces.to_json(spec)}
    found: dict[str, Any] = json.loads(
        json.dumps({"config": json.loads(config.model_dump_json()), **environment}, allow_nan=False)
    )
    return found


def paths(config: Config, saved: dict[str, Any], spec: EnvironmentSpec = SPEC) -> list[str]:
    return [problem.path for problem in check_resume(config, spec, saved)]


@pytest.mark.parametrize("spec", [SPEC, BOX])
def test_spaces_survive_strict_json(spec: EnvironmentSpec) -> None:
    assert spec == read_environment(manifest(spec=spec)["environment"])


@pytest.mark.parametrize(
    "document", [None, 3, [], {}, {"id": "x"}, {"id": "x", "observation": 1}, {"a": object()}]
)
def test_a_document_that_describes_no_spaces_is_none(document: object) -> None:
    assert read_environment(document) is None


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"network": {"hidden": [8]}}, "network.hidden"),
        ({"network": {"activation": "tanh"}}, "network.activation"),
        ({"network": {"lstm": 4}}, "network.lstm"),
        ({"network": {"share_torso": True}}, "network.share_torso"),
        ({"network": {"kwargs": {"log_std": -1.0}}}, "network.kwargs"),
        ({"env": {"normalisation": {"observations": True}}}, "env.normalisation.observations"),
        ({"env": {"normalisation": {"returns": True}}}, "env.normalisation.returns"),
        ({"algorithm": {"name": "ppo", "epochs": 3}}, None),
        ({"env": {"num_envs": 2}}, None),
        ({"env": {"normalisation": {"clip": 5.0}}}, None),
        ({"run": {"max_updates": 9, "seed": 7}}, None),
    ],
)
def test_settings_that_saved_arrays_depend_on_are_refused_by_path(
    sections: dict[str, Any], path: str | None
) -> None:
    assert ([] if path is None else [path]) == paths(cartpole(**sections), manifest())


def test_another_algorithm_is_refused_and_says_which_one_wrote_the_checkpoint() -> None:
    saved = manifest()
    saved["config"]["algorithm"] = {"name": "impala"}
    (problem,) = check_resume(BEFORE, SPEC, saved)  # type: ignore[arg-type]  # asserted above
    assert (
        "algorithm.name = 'ppo': the checkpoint was written with 'impala', so the saved state cannot "
        "be loaded; accepted: 'impala'; or start a new run, without --resume"
    ) == str(problem)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            replace(SPEC, observation=(LeafSpec("", (3,), "float32"),)),
            "observations observation float32[4], the environment observation float32[3]",
        ),
        (
            replace(SPEC, action=replace(SPEC.action, categories=(3,))),
            "actions discrete [] of 2, the environment discrete [] of 3",
        ),
        (replace(SPEC, action_mask=True), "no action mask, the environment has one"),
    ],
)
def test_other_spaces_are_refused_at_the_setting_that_changed_them(
    spec: EnvironmentSpec, text: str
) -> None:
    other = cartpole(env={"kwargs": {"sutton_barto_reward": True}})
    (problem,) = check_resume(other, spec, manifest())
    assert "env.kwargs" == problem.path
    assert text in problem.message


def test_other_bounds_of_actions_are_refused() -> None:
    other = replace(BOX, action=replace(BOX.action, high=(2.0, inf)))
    (problem,) = check_resume(BEFORE, other, manifest(spec=BOX))
    assert "actions from [-inf, 0.0] to [1.0, inf], the environment from" in problem.message


def test_another_environment_with_the_same_spaces_is_accepted() -> None:
    assert [] == paths(cartpole(env={"id": "CartPole-v0"}), manifest())


@pytest.mark.parametrize("env", ["CartPole-v1", "CartPole-v0"])
def test_a_checkpoint_without_spaces_is_continued_in_its_environment_only(env: str) -> None:
    expected = [] if env == "CartPole-v1" else ["env.id"]
    assert expected == paths(cartpole(env={"id": env}), manifest(spec=None))


def test_every_problem_is_named_at_once() -> None:
    other = cartpole(network={"hidden": [8], "lstm": 4}, env={"id": "Acrobot-v1"})
    spec = replace(SPEC, observation=(LeafSpec("", (6,), "float32"),))
    assert ["network.hidden", "network.lstm", "env.id"] == paths(other, manifest(), spec)


def r2d2(**network: Any) -> Config:
    return load_config(
        {
            "env": {"id": "CartPole-v1"},
            "algorithm": {"name": "r2d2"},
            "network": {"lstm": 4, **network},
        }
    )


def test_another_view_of_the_previous_step_is_refused_at_its_setting() -> None:
    with_it, without = r2d2(), r2d2(previous_step=False)
    for config, saved in ((with_it, without), (without, with_it)):
        spec, before = require_valid(config).spec, require_valid(saved).spec
        assert spec is not None
        (problem,) = check_resume(config, spec, manifest(saved, before))
        assert "network.previous_step" == problem.path
        assert f"was written with {saved.previous_step}" in problem.message
        assert [] == check_resume(config, spec, manifest(config, spec))
        assert [] == check_resume(
            r2d2(previous_step=config.previous_step), spec, manifest(config, spec)
        )


def test_a_checkpoint_of_an_older_version_saw_no_previous_step() -> None:
    without = r2d2(previous_step=False)
    spec = require_valid(without).spec
    assert spec is not None
    older = manifest(without, spec)
    del older["config"]["network"]["previous_step"]
    assert ["network.previous_step"] == paths(r2d2(), older, spec)
    assert [] == paths(without, older, spec)
    assert ["network.previous_step=false"] == older_defaults(older)
    assert not Config.model_validate(saved_settings(older)).previous_step
    assert not load_config(older["config"], older_defaults(older)).previous_step
    newer = manifest(r2d2())
    assert [] == older_defaults(newer)
    assert Config.model_validate(saved_settings(newer)).previous_step


@pytest.mark.parametrize("config", [3, "text", {}, {"network": 3}])
def test_settings_that_are_no_tables_are_returned_unchanged(config: object) -> None:
    assert config == saved_settings({"config": config})
