"""Runs as Prometheus sees them: a collector over the table of families that reads each run once per
scrape.

One snapshot per run and scrape, so that ``begun = trained + inserted + dropped + open`` holds at
every scrape, and with replay ``drawn = trained + discarded + held``.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping

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
from tianflow.observability.prometheus.families import FAMILIES
from tianflow.observability.prometheus.family import Family
from tianflow.observability.prometheus.steady import MonotonicTimes

PREFIX = "tianflow_"
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


def own_families(requests: Mapping[int, int]) -> Iterator[CounterMetricFamily | InfoMetricFamily]:
    """What a server tells of itself rather than of a run; ``requests``: those answered, by status
    code.
    """
    answered = CounterMetricFamily(
        f"{PREFIX}http_requests", "HTTP requests answered.", labels=("code",)
    )
    for code, count in sorted(requests.items()):
        answered.add_metric((str(code),), count)
    yield answered
    build = InfoMetricFamily(f"{PREFIX}build", "Version of tianflow, and of Python under it.")
    build.add_metric((), {"version": __version__, "python": platform.python_version()})
    yield build


class RunCollector(Collector):
    """Turns runs into metric families.

    Args:
        runs: gives the statistics of every run to show; called once per scrape.
        requests: answered HTTP requests by status code, read at every scrape; empty where there is
            no server.
    """

    def __init__(
        self, *, runs: Callable[[], Iterable[RunStatistics]], requests: Mapping[int, int]
    ) -> None:
        self._runs, self._requests = runs, requests
        self._times = MonotonicTimes()

    def describe(self) -> list[Metric]:
        """Nothing: keeps the registry from scraping a run only to learn names."""
        return []

    def collect(self) -> Iterator[Metric | InfoMetricFamily]:
        """All families, from one snapshot of every run."""
        runs = self._times.correct(tuple(self._runs()))
        for family in FAMILIES:
            yield _metric(family, runs)
        yield from own_families(self._requests)


class Exporter:
    """A registry of its own with one `RunCollector`, and its exposition in the format that a
    scraper accepts.
    """

    def __init__(
        self, *, runs: Callable[[], Iterable[RunStatistics]], requests: Mapping[int, int]
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(RunCollector(runs=runs, requests=requests))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type; see `encoded`."""
        return encoded(self._registry, accept)


def encoded(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """What ``registry`` collects, and its content type: OpenMetrics if ``accept`` (an Accept
    header) asks for it, else text.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (
        TypeError,
        ValueError,
    ):  # it compares versions number by number, and anybody may ask for one that is no number
        encode, content_type = choose_encoder("")
    return encode(registry), content_type
