"""A value of a config is the same in every form that it takes on its way, or is refused by path."""

from __future__ import annotations

import datetime as dt
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import examples
from tianflow.config.loading import load_config, to_toml, with_changes, write_config
from tianflow.config.model import Config, EnvSettings, PPOSettings
from tianflow.envs import checking
from tianflow.errors import ConfigError
from tianflow.planning.validation import validate

FREE = ("env.kwargs", "network.kwargs", "metrics.kwargs.tensorboard")
TABLES: dict[str, Any] = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}
REFUSED = [
    (math.inf, "", "is not finite"),
    (-math.inf, "", "is not finite"),
    (math.nan, "", "is not finite"),
    (2**63, "", "is too large"),
    (-(2**63) - 1, "", "is too large"),
    (dt.date(2026, 1, 31), "", "is a date or a time"),
    (dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC), "", "is a date or a time"),
    (dt.time(12), "", "is a date or a time"),
    ([1.0, {"deep": math.inf}], ".1.deep", "is not finite"),
    ([1, None], ".1", "is null"),
    ([{"deep": None}], ".0.deep", "is null"),
    ({1: 2}, "", "has the key 1"),
    (b"x", "", "has the type bytes"),
    ({1, 2}, "", "has the type set"),
]


def within(path: str, value: object) -> dict[str, Any]:
    """Tables with ``value`` at a dotted path."""
    *parents, last = path.split(".")
    tables: dict[str, Any] = {key: dict(table) for key, table in TABLES.items()}
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
    table[last] = value
    return tables


def refused(source: Any, overrides: Any = ()) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as error:
        load_config(source, overrides)
    return [(problem.path, problem.message) for problem in error.value.problems]


@pytest.mark.parametrize(("value", "where", "message"), REFUSED)
@pytest.mark.parametrize("free", FREE)
def test_a_value_that_a_form_of_the_config_lacks_is_refused_by_path(
    free: str, value: object, where: str, message: str
) -> None:
    path = f"{free}.limit"
    for found in (refused(within(path, value)), refused(TABLES, {path: value})):
        ((at, said),) = found
        assert f"{path}{where}" == at
        assert message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inf", "is not finite"),
        ("nan", "is not finite"),
        ("2026-01-31", "is a date"),
        ("12:00:00", "is a date or a time"),
        (str(2**64), "is too large"),
    ],
)
@pytest.mark.parametrize("free", FREE)
def test_a_file_and_an_override_are_refused_as_the_same_value_in_python(
    free: str, text: str, message: str, tmp_path: Path
) -> None:
    section, _, key = free.partition(".")
    lines = {
        "env": ['id = "CartPole-v1"'],
        "algorithm": ['name = "ppo"'],
    }
    lines.setdefault(section, []).append(f"{key}.limit = {text}")
    path = tmp_path / "config.toml"
    path.write_text("\n".join(line for name in lines for line in (f"[{name}]", *lines[name])))
    for found in (refused(path), refused("cartpole_ppo", [f"{free}.limit={text}"])):
        assert f"{free}.limit" in {at for at, _ in found}
        assert any(message in said for _, said in found)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**66), 2**66)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.dates()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner),
    max_leaves=5,
)


def same(expected: object, found: object) -> bool:
    """Equal, also in type and in the sign of zero."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and expected.keys() == found.keys()
            and all(same(value, found[key]) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(expected) == len(found)
            and all(map(same, expected, found))
        )
    return type(expected) is type(found) and repr(expected) == repr(found)


@examples(40)
@given(st.dictionaries(st.text("ab", min_size=1), VALUES, max_size=3))
def test_an_accepted_value_is_the_same_in_every_form(kwargs: dict[str, Any]) -> None:
    try:
        config = load_config(within("env.kwargs", kwargs))
    except ConfigError:
        return
    forms = {
        "TOML": load_config(tomllib.loads(to_toml(config))),
        "JSON to hosts, of manifests": Config.model_validate(json.loads(config.model_dump_json())),
        "JSON of a service's store": load_config(json.loads(json.dumps(config.model_dump()))),
        "msgpack of a probe": Config.model_validate(
            msgpack.unpackb(msgpack.packb(config.model_dump(mode="python")))
        ),
        "a live change": with_changes(config, {"actors": {"count": 2}}),
    }
    for name, form in forms.items():
        assert same(config.env.kwargs, form.env.kwargs), name


@pytest.mark.parametrize("value", [math.inf, 2**70, None, [None], dt.date(2026, 1, 31)], ids=str)
def test_a_config_that_was_made_without_loading_is_refused_where_it_is_validated(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(
        env=EnvSettings(id="CartPole-v1", kwargs={"limit": value}),
        algorithm=PPOSettings(name="ppo"),
    )
    for child in (True, False):
        monkeypatch.setattr("tianflow.planning.probe.needs_child", lambda _, child=child: child)
        (problem,) = validate(config).problems
        assert problem.path in {"env.kwargs.limit", "env.kwargs.limit.0"}


def test_the_settings_of_an_earlier_version_with_an_infinity_are_refused_at_a_resume(
    tmp_path: Path,
) -> None:
    write_config(tmp_path, load_config(within("env.kwargs", {"limit": 1.0})))
    path = tmp_path / "config.toml"
    path.write_text(path.read_text().replace("limit = 1.0", "limit = inf"))
    assert [("env.kwargs.limit", "is not finite, which JSON cannot represent")] == refused(path)


def test_check_env_refuses_the_arguments_that_a_run_refuses() -> None:
    report = checking.check(EnvSettings(id="CartPole-v1", kwargs={"limit": math.inf}))
    assert not report.usable
    assert "env.kwargs.limit = inf: is not finite" in report.problems[0]
