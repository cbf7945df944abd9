"""Panels of Grafana dashboards, and PromQL expressions for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUN = 'run=~"$run"'
RATE = "$__rate_interval"
Json = dict[str, Any]


# Expressions
# --------------------------------------------------------------------------------------------------


def now(name: str, *matchers: str) -> str:
    """The current values of a series."""
    return f"tianflow_{name}{{{', '.join((RUN, *matchers))}}}"


def rate(name: str, *matchers: str) -> str:
    """Increase of a counter per second."""
    return f"rate({now(name, *matchers)}[{RATE}])"


def rate_by(labels: str, name: str, *matchers: str) -> str:
    """Increase of a counter per second, summed over all labels but ``labels``."""
    return f"sum by ({labels}) ({rate(name, *matchers)})"


def mean(histogram: str) -> str:
    """Recent mean of a histogram."""
    return (
        f"sum by (run) ({rate(histogram + '_sum')}) / sum by (run) ({rate(histogram + '_count')})"
    )


def quantile(q: float, histogram: str) -> str:
    """Recent quantile of a histogram."""
    return f"histogram_quantile({q}, {rate_by('run, le', histogram + '_bucket')})"


def shares(component: str) -> str:
    """Shares of time in each state, over all components whose name matches."""
    times = rate_by("run, state", "component_time_seconds_total", f'component=~"{component}"')
    total = rate_by("run", "component_time_seconds_total", f'component=~"{component}"')
    return f"{times} / on (run) group_left () {total}"


# Panels
# --------------------------------------------------------------------------------------------------


def panel(
    kind: str,
    title: str,
    about: str,
    queries: Sequence[tuple[str, str]],
    *,
    width: int,
    height: int,
    **more: Any,
) -> Json:
    """One panel; ``queries`` are (expression, legend)."""
    targets = [
        {
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "refId": chr(ord("A") + place),
        }
        for place, (expression, legend) in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": SOURCE,
        "targets": targets,
        "gridPos": {"w": width, "h": height},
        **more,
    }


def row(title: str) -> Json:
    """A heading above the panels that follow it."""
    place = {"w": 24, "h": 1}
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}


def time_shares(title: str, component: str) -> Json:
    """Share of time in each state, over all components whose name matches."""
    return lines(
        title,
        "Share of time in each state.",
        (shares(component), "{{run}} {{state}}"),
        unit="percentunit",
        stacked=True,
    )


def lines(
    title: str,
    about: str,
    *queries: tuple[str, str],
    unit: str = "short",
    stacked: bool = False,
    width: int = 12,
) -> Json:
    """Lines over time."""
    custom: Json = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    if stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60}
    legend = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    defaults: Json = {
        "unit": unit,
        "custom": custom,
        **({"min": 0, "max": 1} if unit == "percentunit" else {}),
    }
    return panel(
        "timeseries",
        title,
        about,
        queries,
        width=width,
        height=8,
        fieldConfig={"defaults": defaults, "overrides": []},
        options=options,
    )


def figure(
    title: str,
    about: str,
    query: str,
    *,
    legend: str = "{{run}}",
    unit: str = "short",
    bad_from: float | None = None,
) -> Json:
    """One number, or the name of a current series; red from ``bad_from`` on."""
    steps: list[Json] = [{"color": "text", "value": None}]
    if bad_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": bad_from}]
    named = legend != "{{run}}"
    options = {
        "textMode": "name" if named else "value",
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "showPercentChange": False,
        "wideLayout": True,
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    defaults = {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}}
    made = panel(
        "stat",
        title,
        about,
        [(query, legend)],
        width=4,
        height=4,
        fieldConfig={"defaults": defaults, "overrides": []},
        options=options,
    )
    if named:  # a range would show every name that occurred in it
        made["targets"][0] |= {"instant": True, "range": False}
    return made


def heatmap(title: str, about: str, query: str) -> Json:
    """Buckets of a histogram over time."""
    made = panel("heatmap", title, about, [(query, "{{le}}")], width=12, height=8)
    made["targets"][0]["format"] = "heatmap"
    colour = {
        "mode": "scheme",
        "scheme": "Blues",
        "steps": 32,
        "reverse": False,
        "exponent": 0.5,
        "fill": "dark-blue",
    }
    made["fieldConfig"] = {"defaults": {}, "overrides": []}
    made["options"] = {
        "calculate": False,
        "cellGap": 1,
        "yAxis": {"unit": "short"},
        "color": colour,
        "exemplars": {"color": "orange"},
        "legend": {"show": True},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False},
    }
    return made
