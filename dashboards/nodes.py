"""Panels of the nodes of runs on several machines."""

from __future__ import annotations

from dashboards.panels import Json, lines, now, rate


def node_panels() -> list[Json]:
    """Panels for the launchers that use nodes; without nodes they are empty."""
    return [
        lines(
            "Nodes",
            "1 while a node is connected and takes hosts.",
            (now("node_ready"), "{{run}} {{node}}"),
            width=6,
        ),
        lines(
            "Hosts of nodes",
            "Host processes on each node, and actors that rest because they were late.",
            (now("node_hosts"), "{{run}} {{node}} hosts"),
            (now("node_late_actors"), "{{run}} {{node}} late actors"),
            width=6,
        ),
        lines(
            "Data from nodes",
            "Bytes received per second, by node and kind.",
            (rate("node_received_bytes_total"), "{{run}} {{node}} {{kind}}"),
            unit="Bps",
        ),
        lines(
            "Data to nodes",
            "Bytes sent per second, by node and kind.",
            (rate("node_sent_bytes_total"), "{{run}} {{node}} {{kind}}"),
            unit="Bps",
        ),
        lines(
            "Weights of nodes",
            "Published versions that a node does not have yet.",
            (now("node_weights_lag"), "{{run}} {{node}}"),
            width=6,
        ),
        lines(
            "Connections to nodes",
            "Last round trip, and time since a node was heard.",
            (now("node_round_trip_seconds"), "{{run}} {{node}} round trip"),
            (now("node_silent_seconds"), "{{run}} {{node}} silent"),
            unit="s",
            width=6,
        ),
    ]
