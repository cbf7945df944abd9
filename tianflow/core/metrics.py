"""Metadata that makes a metric of a field of a statistics dataclass.

    steps: int = field(metadata=metric("Environment steps made.", kind="counter"))

`tianflow.observability.prometheus` finds the fields and derives name, type and help from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, replace
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric family that one field fills.

    Attributes:
        help: noun phrase, with a full stop.
        kind: a counter only grows while its process lives.
        name: without the prefix of all metrics and the ``_total`` of counters.
        labels: names of the labels that the keys of a mapping, or a state's name, are values of.
        known: keys that have a series before they first occur, so that an increase from 0 is seen;
            of a state, all its names.
        missing: value while the field is None; without one the family has no series then.
        buckets: upper edges, of a mapping that counts whole numbers; empty for a `Histogram`.
        exposed: False excludes the field from ``/metrics``.
    """

    help: str
    kind: Kind
    name: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    missing: float | None = None
    buckets: tuple[int, ...] = ()
    exposed: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """A field that holds a statistics dataclass, or several of them.

    Attributes:
        label: name of the label that distinguishes them; empty where there is one.
        key: attribute with the label's value; empty for a mapping, whose keys are the values.
    """

    label: str = ""
    key: str = ""


def metric(
    help: str,  # noqa: A002 - what Prometheus calls it
    *,
    kind: Kind = "gauge",
    name: str = "",
    labels: tuple[str, ...] = (),
    known: tuple[str, ...] = (),
    missing: float | None = None,
    buckets: tuple[int, ...] = (),
    exposed: bool = True,
) -> Mapping[str, Metric]:
    """Metadata of a field that is a metric; see `Metric`. Without ``name`` it has the field's."""
    return {"metric": Metric(help, kind, name, labels, known, missing, buckets, exposed)}


def parts(label: str = "", *, key: str = "") -> Mapping[str, Parts]:
    """Metadata of a field whose dataclasses have metrics of their own; see `Parts`."""
    return {"parts": Parts(label, key)}


def metric_of(field: Field[Any]) -> Metric | None:
    """The metric of ``field``, with its name; None if it has none."""
    found: Metric | None = field.metadata.get("metric")
    if found is None or found.name:
        return found
    return replace(found, name=field.name)
