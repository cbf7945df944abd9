"""Metrics of the service and all its runs on one page: each run exposes its own, and the pages are
merged by family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tianflow.observability.prometheus.prometheus import PREFIX, encoded, own_families
from tianflow.server.service.store import STATES

END = "# EOF"
"""Last line of an OpenMetrics page."""


class ServiceCollector(Collector):
    """Metrics of the service itself.

    Args:
        counts: runs by state, from the store.
        restarts: restarted processes of runs.
        requests: answered HTTP requests by status code.
    """

    def __init__(
        self, *, counts: Mapping[str, int], restarts: int, requests: Mapping[int, int]
    ) -> None:
        self._counts, self._restarts, self._requests = counts, restarts, requests

    def collect(self) -> Iterator[Metric]:
        """All families."""
        runs = GaugeMetricFamily(
            f"{PREFIX}service_runs",
            "Runs in the store of the service, by state.",
            labels=("state",),
        )
        for state in STATES:
            runs.add_metric((state,), self._counts.get(state, 0))
        yield runs
        yield CounterMetricFamily(
            f"{PREFIX}service_run_restarts",
            "Restarted processes of runs, after they were killed.",
            value=self._restarts,
        )
        yield from own_families(self._requests)


def exposition(collector: ServiceCollector, pages: Sequence[str], accept: str) -> tuple[bytes, str]:
    """One page and its content type.

    Args:
        collector: the service's own metrics.
        pages: metrics of runs, in the format of ``accept``.
        accept: an Accept header; it selects OpenMetrics or text.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    own, content_type = encoded(registry, accept)
    return merged(own.decode(), pages).encode(), content_type


def merged(own: str, pages: Sequence[str]) -> str:
    """All families, each once with the samples of all pages. A family of ``own`` does not concern
    runs, and is taken from there only.
    """
    first = _families(own)
    families: dict[str, tuple[list[str], list[str]]] = {}
    for page in pages:
        for name, (described, samples) in _families(page).items():
            if name not in first:
                families.setdefault(name, (described, []))[1].extend(samples)
    lines = [
        line
        for described, samples in (first | families).values()
        for line in (*described, *samples)
    ]
    return "\n".join([*lines, END] if END in own.rsplit("\n", 2) else lines) + "\n"


def _families(page: str) -> dict[str, tuple[list[str], list[str]]]:
    """(describing lines, samples) of each family by name. A family begins with its HELP line."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    described: list[str] = []
    samples: list[str] = []
    for line in page.removesuffix("\n").split(
        "\n"
    ):  # `str.splitlines` would also split at other characters within a label
        if line.startswith("# HELP "):
            described, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
        if line.startswith("#"):
            if line != END:
                described.append(line)
        else:
            samples.append(line)
    return families
