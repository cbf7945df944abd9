"""The page of a report: summary, charts, changes and settings of a run."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tianflow.core.formatting import DASH, duration, number
from tianflow.core.payloads import NOT_METRICS
from tianflow.observability.run_document import ENDED
from tianflow.report.markup import Markup, element, joined
from tianflow.report.records import Records, number_at, table_at
from tianflow.report.scripts import bundled, data, policy
from tianflow.report.style import css
from tianflow.rundir.history import thinned

CHANGES = 500
"""Maximum number of lines of the audit log on the page; the file has all of them."""
ROWS = 480
"""Maximum number of rows in a chart: more than its pixels only make the page larger."""
PROGRAM = Path(__file__).with_name("report.js")


def page(run: Records, *, now: dt.datetime) -> str:
    """The report of ``run`` as an HTML document, made at ``now``."""
    script = bundled(PROGRAM)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy(script)),
        element("title", f"{run.name}: report"),
        element("style", css()),
    )
    main = element("main", _header(run, now), _facts(run), _charts(run), _audit(run), _config(run))
    drawing = element("script", script) if run.rows else ""
    return f"<!DOCTYPE html>\n{element('html', head, element('body', main, drawing), lang='en')}\n"


def _header(run: Records, now: dt.datetime) -> Markup:
    environment, algorithm = _setting(run, "env", "id"), _setting(run, "algorithm", "name")
    lead = " ".join(
        part for part in (algorithm, "on" if algorithm and environment else "", environment) if part
    )
    error = run.summary.get("error")
    return element(
        "header",
        element("h1", run.name, " ", element("span", _state(run), class_="state")),
        element(
            "p",
            f"{lead}{'. ' if lead else ''}Report of {now.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} "
            "UTC.",
            class_="lead",
        ),
        element("p", f"Error: {error}", class_="error") if error else "",
    )


def _state(run: Records) -> str:
    if run.summary:
        reason = run.summary.get("reason")
        return f"{run.summary.get('state', 'ended')}" + (f" ({reason})" if reason else "")
    if not run.rows:
        return "not known"
    at = number_at(run.rows[-1], "time")
    return f"{run.rows[-1].get('state', 'not known')}" + (
        "" if at is None else f" at {_moment(at)}"
    )


def _moment(seconds: float) -> str:
    try:
        return f"{dt.datetime.fromtimestamp(seconds, dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return DASH


def _setting(run: Records, section: str, key: str) -> str:
    values = run.config.get(section)
    value = values.get(key) if isinstance(values, Mapping) else None
    return "" if value is None else str(value)


# Summary
# --------------------------------------------------------------------------------------------------


def _facts(run: Records) -> Markup:
    rows = [
        element("div", element("dt", name), element("dd", text))
        for name, text in facts(run).items()
    ]
    return joined([element("h2", "Summary"), element("dl", *rows, class_="facts")])


def facts(run: Records) -> dict[str, str]:
    """The run in numbers, by name: from its summary if it has ended, else from its history."""
    last: Mapping[str, Any] = run.rows[-1] if run.rows else {}
    newest = run.summary or last
    target = number_at(run.config, "run", "target_return")
    found = {
        "time": duration(
            number_at(last, "t") if run.rows else number_at(run.summary, "training_s")
        ),
        "environment steps": number(number_at(newest, "env_steps")),
        "steps/s": number(_speed(run)),
        "updates": number(number_at(newest, "updates")),
        "episodes": number(number_at(newest, "episodes")),
        "mean return": number(number_at(newest, "mean_return")),
        "evaluated": _evaluated(run, None),
        **{
            f"evaluated ({name})": _evaluated(run, name)
            for name in table_at(run.config, "evaluation", "further")
        },
        "best": _best(run),
        "target": DASH if target is None else number(target) + _reached(run),
        "staleness": _staleness(run, newest),
        "violations of the bound": number(
            number_at(newest, "staleness", "violations")
            if run.summary
            else number_at(last, "violations")
        ),
        "dropped": _dropped(run),
        "verdicts": _verdicts(run),
        "seed": number(number_at(run.config, "run", "seed")),
        "rows of history": _rows(run),
    }
    return {name: text for name, text in found.items() if text}


def _speed(run: Records) -> float | None:
    if run.summary:
        return number_at(run.summary, "steps_per_s")
    pairs = [
        (rate, number_at(row, "span_s") or 0.0)
        for row in run.rows
        if (rate := number_at(row, "steps_per_s")) is not None
    ]
    seconds = sum(span for _, span in pairs)
    return sum(rate * span for rate, span in pairs) / seconds if seconds > 0.0 else None


def _evaluated(run: Records, name: str | None) -> str:
    """The newest evaluation; ``name``: None for the main one."""
    found = (
        run.summary.get("evaluation")
        if name is None
        else table_at(run.summary, "further_evaluations").get(name)
    )
    if not found:
        found = next(
            (
                mark
                for mark in reversed(run.marks())
                if mark.get("kind") == "evaluation" and mark.get("name") == name
            ),
            None,
        )
    if not isinstance(found, Mapping):
        return DASH
    return _outcome(found)


def _best(run: Records) -> str:
    found = table_at(run.summary, "best")
    return _outcome(found) if found else ""


def _outcome(found: Mapping[str, Any]) -> str:
    version, episodes = number(number_at(found, "version")), number(number_at(found, "episodes"))
    metrics = [
        f", {name} {number(value)}"
        for name, value in sorted(found.items())
        if name not in NOT_METRICS and isinstance(value, int | float)
    ]
    mean = number(number_at(found, "mean_return"))
    return f"{mean} (version {version}, {episodes} episodes{''.join(metrics)})"


def _reached(run: Records) -> str:
    if not run.summary:
        return ""
    after = number_at(run.summary, "time_to_target_s")
    if not run.summary.get("target_reached"):
        return " (not reached)"
    return " (reached)" if after is None else f" (reached after {duration(after)})"


def _staleness(run: Records, newest: Mapping[str, Any]) -> str:
    mean, high = number_at(newest, "staleness", "mean"), number_at(newest, "staleness", "max")
    if not run.summary:
        highest = [value for value in run.series("staleness", "max") if value is not None]
        high = max(highest, default=None)
    bound = number_at(newest, "staleness", "bound")
    return (
        f"mean {number(mean)}, maximum {number(high)}, bound "
        f"{'unbounded' if bound is None else number(bound)}"
    )


def _dropped(run: Records) -> str:
    dropped = _dropped_counts(run)
    return (
        ", ".join(f"{reason} {number(number_at(dropped, reason))}" for reason in dropped) or "none"
    )


def _dropped_counts(run: Records) -> Mapping[str, Any]:
    trajectories = run.summary.get("trajectories")
    dropped = (
        trajectories.get("dropped")
        if isinstance(trajectories, Mapping)
        else run.rows[-1].get("dropped")
        if run.rows
        else None
    )
    return dropped if isinstance(dropped, Mapping) else {}


def _verdicts(run: Records) -> str:
    """Shares of the verdicts by time."""
    seconds: dict[str, float] = {}
    for row in run.rows:
        name = str(row.get("bottleneck", ""))
        if name and name not in ENDED:
            seconds[name] = seconds.get(name, 0.0) + (number_at(row, "span_s") or 0.0)
    total = sum(seconds.values())
    shares = {name: share / total for name, share in seconds.items()} if total > 0.0 else {}
    return (
        ", ".join(
            f"{name} {share:.0%}"
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
            if share >= 0.005
        )
        or DASH
    )


def _rows(run: Records) -> str:
    spans = [span for span in run.series("span_s") if span is not None]
    longest = max(spans, default=0.0)
    return f"{len(run.rows):,}" + (f", each of at most {longest:.3g} s" if longest > 0.0 else "")


# Charts, audit, settings
# ----------------------------------------------------------------------------------------------


def _charts(run: Records) -> Markup:
    if not run.rows:
        text = "This run has no history: it has only just begun, or an older version wrote it."
        return joined([element("h2", "Over time"), element("p", text, class_="note")])
    note = (
        "Vertical dotted lines mark changes, actions and resumes. A point of staleness covers the "
        "time since the point before it, and shows the largest bound of that time."
    )
    if left_out := sum(int(number_at(row, "marks_left_out") or 0) for row in run.rows):
        note += (
            f" {left_out:,} further events have no mark: too many fell into one line of history."
        )
    content = {
        "rows": thinned(run.rows, ROWS),
        "target": number_at(run.config, "run", "target_return"),
    }
    return joined(
        [
            element("h2", "Over time"),
            element("div", element("noscript", "The charts need JavaScript."), id="charts"),
            data(content, "history"),
            element("p", note, class_="note"),
        ]
    )


def _audit(run: Records) -> Markup:
    heading = element("h2", "Changes and actions")
    if not run.audit:
        return joined([heading, element("p", "The run had no changes.", class_="note")])
    names = element(
        "tr", *(element("th", name, scope="col") for name in ("time", "by", "action", "what"))
    )
    rows = [
        element(
            "tr",
            *(
                element("td", text)
                for text in (
                    _when(record),
                    record.get("source", ""),
                    record.get("action", ""),
                    _what(record),
                )
            ),
        )
        for record in run.audit[-CHANGES:]
    ]
    left_out = len(run.audit) - len(rows)
    note = (
        element("p", f"{left_out:,} older ones are not shown.", class_="note") if left_out else ""
    )
    table = element("table", element("thead", names), element("tbody", *rows))
    return joined(
        [
            heading,
            element(
                "div",
                table,
                class_="scroll",
                tabindex="0",
                role="region",
                aria_label="Changes and actions",
            ),
            note,
        ]
    )


def _when(record: Mapping[str, Any]) -> str:
    return str(record.get("time", "")).replace("T", " ").partition(".")[0].removesuffix("+00:00")


def _what(record: Mapping[str, Any]) -> str:
    new, old = record.get("new"), record.get("old")
    if not isinstance(new, Mapping):
        return ""
    before = old if isinstance(old, Mapping) else {}
    return "; ".join(
        f"{path}: {json.dumps(before.get(path))} → {json.dumps(value)}"
        for path, value in new.items()
    )


def _config(run: Records) -> Markup:
    if not run.config_text:
        return Markup("")
    title = element("summary", "Last settings in force, as TOML")
    return joined(
        [
            element("h2", "Settings"),
            element(
                "details", title, element("pre", element("code", run.config_text), tabindex="0")
            ),
        ]
    )
