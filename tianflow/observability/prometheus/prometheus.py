"""Prometheus exporter: a collector that reads each run once per scrape.

A scrape takes one snapshot of a run, so ``begun = trained + inserted + dropped + open`` holds in
every scrape, and with replay ``drawn = trained + discarded + held``.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tianflow import __version__
from tianflow.core.statistics import Histogram, RunStatistics
from tianflow.logs import logger
from tianflow.observability.prometheus.families import FAMILIES
from tianflow.observability.prometheus.family import Family
from tianflow.observability.prometheus.steady import MonotonicTimes

log = logger("metrics")
PREFIX = "tianflow_"
Encoder = Callable[[CollectorRegistry], bytes]
Metric = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def _buckets(distribution: Histogram) -> list[tuple[str, float]]:
    cumulative, buckets = 0, []
    for edge, count in zip((*distribution.edges, math.inf), distribution.counts, strict=True):
        cumulative += count
        buckets.append(("+Inf" if edge == math.inf else repr(float(edge)), float(cumulative)))
    return buckets


def _metric(family: Family, runs: Iterable[RunStatistics]) -> Metric:
    labels = ("run", *family.labels)
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(PREFIX + family.name, family.help, labels=labels)
        for run in runs:
            for values, distribution in family.read(run):
                assert isinstance(distribution, Histogram)
                histogram.add_metric((run.run, *values), _buckets(distribution), distribution.total)
        return histogram
    made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = made(PREFIX + family.name, family.help, labels=labels)
    for run in runs:
        for values, value in family.read(run):
            assert not isinstance(value, Histogram)
            metric.add_metric((run.run, *values), float(value))
    return metric


def _with_earlier(run: RunStatistics) -> RunStatistics:
    """``run``, whose components count since the run's process began, and not since a restart."""
    if not run.earlier:
        return run
    components = tuple(
        component.after(run.earlier[component.name]) if component.name in run.earlier else component
        for component in run.components
    )
    return replace(run, components=components)


def own_families(requests: Mapping[int, int]) -> Iterator[CounterMetricFamily | InfoMetricFamily]:
    """Families of the server itself. ``requests``: number of answered requests by status code."""
    answered = CounterMetricFamily(
        f"{PREFIX}http_requests", "HTTP requests answered.", labels=("code",)
    )
    for code, count in sorted(requests.items()):
        answered.add_metric((str(code),), count)
    yield answered
    build = InfoMetricFamily(f"{PREFIX}build", "Versions of tianflow and of Python.")
    build.add_metric((), {"version": __version__, "python": platform.python_version()})
    yield build


class RunCollector(Collector):
    """Collects the metric families of runs.

    Args:
        runs: gives the statistics of every run to show; called once per scrape.
        requests: answered HTTP requests by status code, read at every scrape; empty without a
            server.
        families: of each run.
    """

    def __init__(
        self,
        *,
        runs: Callable[[], Iterable[RunStatistics]],
        requests: Mapping[int, int],
        families: Sequence[Family] = FAMILIES,
    ) -> None:
        self._runs, self._requests, self._families = runs, requests, families
        self._times = MonotonicTimes()
        self._failures: dict[str, str] = {}

    def describe(self) -> list[Metric]:
        """Empty: the registry need not scrape a run only to learn names."""
        return []

    def collect(self) -> Iterator[Metric | InfoMetricFamily]:
        """All families, from one snapshot of every run. A family that cannot be read is missing,
        and is logged; the others are complete.
        """
        runs = self._times.correct(tuple(map(_with_earlier, self._runs())))
        for family in self._families:
            try:
                metric = _metric(family, runs)
            except Exception as error:  # a boundary: one family must not cost the scrape
                failure = f"{type(error).__name__}: {error}"
                if self._failures.get(family.name) != failure:
                    log.exception("a metric cannot be read", metric=family.name, error=failure)
                self._failures[family.name] = failure
                continue
            yield metric
        yield from own_families(self._requests)


class Exporter:
    """A registry with one `RunCollector`, in the format that the scraper accepts. Arguments are
    those of `RunCollector`.
    """

    def __init__(
        self,
        *,
        runs: Callable[[], Iterable[RunStatistics]],
        requests: Mapping[int, int],
        families: Sequence[Family] = FAMILIES,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(RunCollector(runs=runs, requests=requests, families=families))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type; see `encoded`."""
        return encoded(self._registry, accept)


def encoded(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The metrics of ``registry``, and their content type: OpenMetrics if ``accept`` (an Accept
    header) asks for it, else text.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # it compares versions as numbers, and a client may send text
        encode, content_type = choose_encoder("")
    return _quickly(encode)(registry), content_type


def _quickly(encode: Encoder) -> Encoder:
    """The same encoder, without checking every character of every name.

    To replace what is not allowed in a name by underscores changes no name of ours, and takes half
    the time of a scrape. Versions of the library before 0.22 do not know the argument.
    """
    if isinstance(encode, partial) and encode.keywords.get("escaping") == "underscores":
        return partial(encode.func, **{**encode.keywords, "escaping": "allow-utf-8"})
    return encode
