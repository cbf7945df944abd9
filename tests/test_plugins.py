from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tianflow import plugins
from tianflow.errors import ConfigError, Problem


def problem(name: str, group: str = "tianflow.controllers") -> Problem:
    with pytest.raises(ConfigError) as caught:
        plugins.load(group, name, path="a.path")
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("tianflow.algorithms", {"a2c", "impala", "ppo"}),
        ("tianflow.networks", {"impala_resnet", "mlp", "nature_cnn"}),
        ("tianflow.controllers", {"freshest", "lockstep", "open_loop", "staleness"}),
        ("tianflow.launchers", {"inline", "processes"}),
    ],
)
def test_built_in_plug_ins_are_installed_through_entry_points(group: str, names: set[str]) -> None:
    assert names <= set(plugins.names(group))


@pytest.mark.parametrize(
    "group",
    ["tianflow.algorithms", "tianflow.networks", "tianflow.controllers", "tianflow.launchers"],
)
def test_every_installed_name_refers_to_a_callable(group: str) -> None:
    for name in plugins.names(group):
        assert callable(plugins.load(group, name, path="a.path"))


def test_a_group_without_plug_ins_has_no_names() -> None:
    assert () == plugins.names("tianflow.nothing")


def test_the_refusal_of_an_unknown_name_lists_installed_names_and_the_nearest() -> None:
    found = problem("freshst")
    assert ("a.path", "freshst", "freshest") == (found.path, found.value, found.nearest)
    assert (
        "one of consume_only, freshest, lockstep, open_loop, sample_ratio, staleness, or "
        "module:attribute" == found.accepted
    )


def test_a_missing_name_is_refused_with_a_few_of_those_that_exist() -> None:
    said = plugins.missing("run-77", [], heading="runs")
    assert "does not exist; runs: none" == said
    said = plugins.missing("run-7", ["b", "run-8"], heading="runs")
    assert "does not exist (did you mean 'run-8'?); runs: b, run-8" == said
    many = [f"run-{number}" for number in range(100)]
    said = plugins.missing("run-77x", many, heading="runs")
    assert said.startswith("does not exist (did you mean 'run-77'?); runs: run-77, ")
    assert said.endswith(" and 95 more")


def test_any_importable_object_may_be_named() -> None:
    assert ConfigError is plugins.load(
        "tianflow.controllers", "tianflow.errors:ConfigError", path="a.path"
    )
    assert ConfigError.__init__ is plugins.load(
        "tianflow.controllers", "tianflow.errors:ConfigError.__init__", path="a.path"
    )


@pytest.mark.parametrize("name", ["__main__:Controller", "tianflow.errors:"])
def test_an_object_that_other_processes_cannot_import_is_refused(name: str) -> None:
    assert "move it to a module of its own" in problem(name).message


def test_the_refusal_of_a_misspelt_attribute_gives_the_nearest() -> None:
    assert "ConfigError" == problem("tianflow.errors:ConfigEror").nearest


def test_a_missing_module_is_named() -> None:
    found = problem("no_such_module:Controller")
    assert "cannot import 'no_such_module'" in found.message
    assert "a module in the current directory, in PYTHONPATH, or installed" == found.accepted


def test_a_module_with_a_missing_import_is_not_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_module_that_lacks_another.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = problem("a_module_that_lacks_another:Controller")
    assert "No module named 'no_such_module'" in found.message
    assert "" == found.accepted


def test_the_error_of_a_module_that_raises_on_import_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "a_broken_module":
                raise ZeroDivisionError("in the user's module")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert (
        'ZeroDivisionError("in the user\'s module")'
        in problem("a_broken_module:Controller").message
    )


def test_a_script_that_exits_on_import_becomes_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_script_without_guard.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        "cannot import 'a_script_without_guard': SystemExit(0)"
        == problem("a_script_without_guard:Controller").message
    )


def test_attributes_are_resolved_along_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_module")
    module.outer = ModuleType("outer")  # type: ignore[attr-defined]
    module.outer.inner = 3
    monkeypatch.setitem(sys.modules, "a_module", module)
    assert 3 == plugins.load_object("a_module:outer.inner", path="a.path")
