"""Families from the fields of statistics dataclasses: a field with a `Metric` is a family.

A field with `Parts` holds a dataclass, a mapping of them or a tuple of them; their fields count,
too. Everything here runs once, at import; what remains for a scrape is to read attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from tianflow.core.metrics import Metric, Parts, metric_of
from tianflow.core.statistics import Histogram, RunStatistics
from tianflow.observability.prometheus.family import Family, Rows

Found = Iterable[tuple[tuple[str, ...], Any]]
"""Label values, and the dataclass that they belong to."""
Source = Callable[[Any], Found]


def families_of(cls: type, *, source: Source | None = None) -> Iterator[Family]:
    """The families of ``cls`` and of its parts.

    Args:
        cls: dataclass of statistics; the root is that of a run.
        source: finds its instances in the statistics of a run; None: they are the root.
    """
    yield from _families(cls, _root if source is None else source, ())


def families_of_role(
    role: str, cls: type, *, label: str, named: Callable[[str], str]
) -> Iterator[Family]:
    """The families of the measures ``cls`` that components of ``role`` report.

    Args:
        role: of the components.
        cls: dataclass of their measures.
        label: name of the label that distinguishes components.
        named: makes its value of a component's name.
    """
    for field in fields(cls):
        metric = metric_of(field)
        if metric is not None and metric.exposed:
            read = _measure_reader(role, field.name, metric, named)
            yield Family(metric.kind, metric.name, metric.help, (label,), read)


def histogram_of(counts: Mapping[int, int], edges: tuple[int, ...]) -> Histogram:
    """Exact counts of whole numbers as a histogram. A negative number, a bug, counts as 0: the sum
    of a histogram must not decrease.
    """
    totals = [0] * (len(edges) + 1)
    for number, count in counts.items():
        totals[next((i for i, edge in enumerate(edges) if number <= edge), -1)] += count
    total = sum(max(0, number) * count for number, count in counts.items())
    return Histogram(tuple(float(edge) for edge in edges), tuple(totals), float(total))


def _root(run: Any) -> Found:
    return (((), run),)


def _families(cls: type, source: Source, labels: tuple[str, ...]) -> Iterator[Family]:
    hints = get_type_hints(cls)
    for field in fields(cls):
        metric, parts = metric_of(field), field.metadata.get("parts")
        if metric is not None and metric.exposed:
            read = _reader(source, field, metric)
            yield Family(metric.kind, metric.name, metric.help, (*labels, *metric.labels), read)
        if isinstance(parts, Parts):
            part = _dataclass_in(hints[field.name])
            if part is None:
                raise TypeError(f"{cls.__name__}.{field.name} holds parts, but no dataclass")
            inner = (*labels, parts.label) if parts.label else labels
            yield from _families(part, _parts(source, field.name, parts), inner)


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass in an annotation such as ``Mapping[str, SinkStatistics]``."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(_dataclass_in, get_args(hint))), None)


def _parts(source: Source, name: str, parts: Parts) -> Source:
    def one(run: Any) -> Found:
        for values, owner in source(run):
            if (part := getattr(owner, name)) is not None:
                yield values, part

    def by_key(run: Any) -> Found:
        for values, owner in source(run):
            for key, part in getattr(owner, name).items():
                yield (*values, str(key)), part

    def by_attribute(run: Any) -> Found:
        for values, owner in source(run):
            for part in getattr(owner, name):
                yield (*values, str(getattr(part, parts.key))), part

    return by_attribute if parts.key else by_key if parts.label else one


def _reader(source: Source, field: Field[Any], metric: Metric) -> Callable[[RunStatistics], Rows]:
    name, rows = field.name, _rows(metric)

    def read(run: RunStatistics) -> Rows:
        for values, owner in source(run):
            for more, value in rows(getattr(owner, name)):
                yield (*values, *more), value

    return read


def _rows(metric: Metric) -> Callable[[Any], Rows]:
    """Series of one value of the field."""
    if metric.buckets:
        return lambda counts: [((), histogram_of(counts, metric.buckets))]
    if not metric.labels:
        return lambda value: _single(metric.missing if value is None else value)
    zeros: dict[Any, float] = dict.fromkeys(metric.known, 0.0)

    def labelled(value: Any) -> Rows:
        found = {name: float(name == value) for name in zeros} if isinstance(value, str) else value
        for key, number in {**zeros, **found}.items():
            yield key if isinstance(key, tuple) else (str(key),), number

    return labelled


def _single(value: Any) -> Rows:
    return [] if value is None else [((), value)]


def _measure_reader(
    role: str, name: str, metric: Metric, named: Callable[[str], str]
) -> Callable[[RunStatistics], Rows]:
    mapping = {"counter": "counters", "gauge": "gauges", "histogram": "distributions"}[metric.kind]

    def read(run: RunStatistics) -> Rows:
        for component in run.components:
            if component.role == role and name in (values := getattr(component, mapping)):
                yield (named(component.name),), values[name]

    return read
