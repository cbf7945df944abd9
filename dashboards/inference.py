"""Panels of inference servers."""

from __future__ import annotations

from dashboards.panels import Json, lines, mean, quantile, rate, time_shares


def inference_panels() -> list[Json]:
    """Panels for ``actors.inference = "central"``; without servers they are empty."""
    return [
        lines(
            "Requests for inference",
            "Requests answered per second, by server; a request has the observations of one actor.",
            (rate("inference_requests_total"), "{{run}} {{component}}"),
            (rate("inference_padding_rows_total"), "{{run}} {{component}} padding"),
            (rate("inference_failures_total"), "{{run}} {{component}} failed batches"),
            unit="ops",
        ),
        lines(
            "Batches of inference",
            "Mean number of requests in a batch.",
            (mean("inference_batch_requests"), "{{run}}"),
        ),
        lines(
            "Time of inference",
            "From a request to its answer, and of one batch.",
            (quantile(0.5, "inference_wait_seconds"), "{{run}} request, median"),
            (quantile(0.99, "inference_wait_seconds"), "{{run}} request, p99"),
            (mean("inference_seconds"), "{{run}} batch, mean"),
            unit="s",
        ),
        lines(
            "Weights of inference",
            "Versions loaded per second, by server.",
            (rate("inference_weight_loads_total"), "{{run}} {{component}}"),
            unit="ops",
        ),
        time_shares("Inference servers' time", "inference-.+"),
    ]
