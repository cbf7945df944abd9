"""The nodes of `benchmarks.lib.nodes` in tests."""

from __future__ import annotations

from benchmarks.lib.nodes import END_S, NodeProcess, nodes

__all__ = ["END_S", "NodeProcess", "nodes"]
