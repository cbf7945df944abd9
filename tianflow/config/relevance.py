"""`relevant`: the settings that have an effect on training, for pages that show all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tianflow.config.model import BUILT_IN_ALGORITHMS, ON_ONE_MACHINE
from tianflow.config.off_policy import OffPolicySettings

OMITTED = ("http", "metrics", "ray", "slurm")
"""Sections without an effect on training. Arguments of a sink may be private."""


def relevant(tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of ``tables``, all settings of a run as JSON, that have an effect on its training.

    `replay` is omitted for a built-in algorithm without replay, `inference` without inference
    servers, `cluster` with a launcher for one machine. Nothing is imported or checked: ``tables``
    may come from a damaged file.
    """
    sections = {name: values for name, values in tables.items() if isinstance(values, dict)}
    algorithm = BUILT_IN_ALGORITHMS.get(str(sections.get("algorithm", {}).get("name")))
    without = set(OMITTED)
    if algorithm is not None and not issubclass(algorithm, OffPolicySettings):
        without.add("replay")
    if sections.get("actors", {}).get("inference") != "central":
        without.add("inference")
    if sections.get("placement", {}).get("launcher") in ON_ONE_MACHINE:
        without.add("cluster")
    return {name: values for name, values in sections.items() if name not in without}
