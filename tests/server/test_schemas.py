"""The schema of a document is made from its dataclass, as `json_ready` writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator, ValidationError

from tests.support.fakes_run import FakeRun
from tianflow.core.jsonable import JsonDocument, json_ready
from tianflow.core.statistics import Diagnosis
from tianflow.observability.rates import RunRates
from tianflow.observability.recorder import Recorder
from tianflow.observability.run_document import RunDocument, describe
from tianflow.rundir.history import NAME, HistoryFile
from tianflow.rundir.summary import summarise
from tianflow.server.common.schemas import named, of_dataclass, reference

WHOLE = {"components": {"schemas": named()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lamp(JsonDocument):
    watts: float
    """Power in watts."""
    state: Literal["on", "off"] | int = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch(RunDocument):
    lamps: Mapping[str, Lamp]
    range_: tuple[float, float] | None = None


@cache
def of_scratch() -> dict[str, Any]:
    return of_dataclass(Scratch)


def check(schema: dict[str, Any], value: object) -> None:
    Draft202012Validator({**schema, **WHOLE}).validate(value)


def scratch() -> Scratch:
    run = FakeRun(replay=True)
    run.train(3)
    rates = RunRates(read=run.statistics)
    found = describe(rates.sample(), run.config, rates)
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return Scratch(**values, lamps={"left": Lamp(watts=math.nan)})


def test_a_new_field_of_a_document_is_in_its_json_and_in_its_schema() -> None:
    schema, value = of_scratch(), json_ready(scratch())
    assert {"left": {"watts": None, "state": "off"}} == value["lamps"]
    lamp = schema["properties"]["lamps"]["additionalProperties"]
    assert "Power in watts." == lamp["properties"]["watts"]["description"]
    assert {"lamps", "range", "diagnosis"} <= set(schema["required"])
    check(schema, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.pop("range"),
        lambda value: value["lamps"]["left"].pop("state"),
        lambda value: value["lamps"]["left"].update(more=1),
        lambda value: value["lamps"]["left"].update(watts="1"),
        lambda value: value["lamps"]["left"].update(state="dim"),
        lambda value: value.update(range=[1.0]),
        lambda value: value["progress"].update(updates=-1),
        lambda value: value["throughput"]["env_steps_per_s"].update({"61": 1.0}),
        lambda value: value["replay"].pop("held"),
        lambda value: value["diagnosis"].pop("verdict"),
    ],
)
def test_a_value_that_is_not_such_a_document_is_refused(change: Any) -> None:
    value = json_ready(scratch())
    change(value)
    with pytest.raises(ValidationError):
        check(of_scratch(), value)


def test_dataclasses_with_a_name_are_referred_to_by_it() -> None:
    run = named()["Run"]["properties"]
    assert reference("Diagnosis") == run["diagnosis"]
    assert reference("Controller") == run["controllers"]["items"]
    assert "$ref" not in str(named()["Diagnosis"])
    check(named()["Diagnosis"], json_ready(Diagnosis("balanced", "", forecast_range=(1.0, 2.0))))


@pytest.mark.parametrize("replay", [False, True])
def test_a_row_of_history_and_a_summary_are_as_described(tmp_path: Any, replay: bool) -> None:
    run = FakeRun(directory=tmp_path, replay=replay)
    recorder = Recorder(run=run, file=HistoryFile(tmp_path / NAME))
    recorder.sample()
    run.evaluation = {"version": 3.0, "mean_return": math.inf}
    run.train(2)
    whole = {**named()["HistoryRow"], "required": list(named()["HistoryRow"]["properties"])}
    check(whole, recorder.sample())
    check(named()["HistoryRow"], {"t": 1.0})
    summary = summarise(
        replace(run.statistics(), recent_returns=()),
        reason="",
        target_reached=False,
        training_s=None,
        seed=1,
        error=None,
    )
    check({**named()["Summary"], "additionalProperties": False}, summary)
    assert set(named()["Summary"]["properties"]) == set(summary)
