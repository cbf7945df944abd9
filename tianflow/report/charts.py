"""Charts as inline SVG: lines, steps and bands, and stacked shares. Pure functions: numbers in,
markup out.

A text beside each chart says what the picture says. What is None or not finite is a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tianflow.report.markup import Markup, element, joined
from tianflow.report.scales import Axis, drawable, time_axis, value_axis

WIDTH, HEIGHT = 560.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 72.0, 14.0, 12.0, 50.0
"""Room for labels, also for the larger ones of a narrow screen."""
COLOURS = 8
NOTHING = "Nothing was recorded."

Values = Sequence[float | None]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A series. ``steps``: each value holds for the time up to its own; None there is no value at
    all, such as no bound.
    """

    name: str
    values: Values
    colour: int
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """The area between two series."""

    name: str
    low: Values
    high: Values
    colour: int


@dataclass(frozen=True, slots=True)
class Dot:
    """A single value at a time, with what it is."""

    t: float
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment at which something changed."""

    t: float
    label: str


def line_chart(
    *,
    key: str,
    title: str,
    unit: str,
    times: Sequence[float],
    lines: Sequence[Line],
    band: Band | None = None,
    dots: Sequence[Dot] = (),
    dots_name: str = "",
    marks: Sequence[Mark] = (),
    zero: bool = True,
    whole: bool = False,
) -> Markup:
    """Series over time.

    Args:
        key: of this chart on its page, for ids.
        title: what it shows.
        unit: of the values.
        times: of the values, ascending seconds.
        lines: each as long as ``times``.
        band: under the lines.
        dots: single values.
        dots_name: what they are.
        marks: vertical lines.
        zero: whether 0 is on the axis whatever the values.
        whole: whether only whole numbers make sense.
    """
    lines = [
        Line(line.name, [drawable(value) for value in line.values], line.colour, line.steps)
        for line in lines
    ]
    if band is not None:
        band = Band(
            band.name,
            [drawable(value) for value in band.low],
            [drawable(value) for value in band.high],
            band.colour,
        )
    dots = [dot for dot in dots if drawable(dot.value) is not None]
    everything = [value for line in lines for value in line.values] + [dot.value for dot in dots]
    everything += [] if band is None else [*band.low, *band.high]
    if all(value is None for value in everything):
        return _figure(key=key, title=title, unit=unit, words=NOTHING)
    x, y = (
        time_axis([*times, *(dot.t for dot in dots)]),
        value_axis(everything, zero=zero, whole=whole),
    )
    shapes = [] if band is None else _band(band, times, x, y)
    for line in lines:
        shapes += _line(line, times, x, y)
    for dot in dots:
        shapes.append(
            _circle((_x(dot.t, x), _y(dot.value, y)), 4.0, f"dot c{COLOURS - 1}", dot.label)
        )
    swatches = [(line.name, f"c{line.colour}" + (" step" if line.steps else "")) for line in lines]
    swatches += [] if band is None else [(band.name, f"c{band.colour} area")]
    swatches += [(dots_name, f"c{COLOURS - 1} round")] if dots else []
    words = _words(lines, band, dots, dots_name)
    return _figure(
        key=key,
        title=title,
        unit=unit,
        words=words,
        swatches=swatches,
        drawing=_drawing(x, y, shapes, marks),
    )


def share_chart(
    *,
    key: str,
    title: str,
    times: Sequence[float],
    parts: Mapping[str, Values],
    colours: Mapping[str, int],
    marks: Sequence[Mark] = (),
) -> Markup:
    """Parts of a whole over time, stacked from 0 to 100 %, in the order given. Each part is a
    fraction; None everywhere is a gap.
    """
    known = {name: [drawable(value) for value in values] for name, values in parts.items()}
    present = [any(values[at] is not None for values in known.values()) for at in range(len(times))]
    if not any(present):
        return _figure(key=key, title=title, unit="% of time", words=NOTHING)
    x, y = time_axis(times), value_axis([0.0, 100.0], zero=True)
    shapes: list[Markup] = []
    below = [0.0] * len(times)
    for name, values in known.items():
        above = [
            under + max(0.0, value or 0.0) * 100.0
            for under, value in zip(below, values, strict=True)
        ]
        low = [under if there else None for under, there in zip(below, present, strict=True)]
        high = [
            min(over, 100.0) if there else None for over, there in zip(above, present, strict=True)
        ]
        shapes += _band(Band(name, low, high, colours[name]), times, x, y, css="share")
        below = [min(over, 100.0) for over in above]
    means = {
        name: sum(value or 0.0 for value in values) / sum(present) for name, values in known.items()
    }
    words = "; ".join(f"{name} {mean:.0%} on average" for name, mean in means.items())
    swatches = [(f"{name} {mean:.0%}", f"c{colours[name]} area") for name, mean in means.items()]
    return _figure(
        key=key,
        title=title,
        unit="% of time",
        words=f"Shares of time: {words}.",
        swatches=swatches,
        drawing=_drawing(x, y, shapes, marks),
    )


# Shapes
# --------------------------------------------------------------------------------------------------


def _x(t: float, axis: Axis) -> float:
    return LEFT + axis.place(t) * (WIDTH - LEFT - RIGHT)


def _y(value: float, axis: Axis) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _runs(times: Sequence[float], values: Values) -> Iterable[list[int]]:
    """Indices of neighbours that all have a value."""
    run: list[int] = []
    for at in range(min(len(times), len(values))):
        if values[at] is not None:
            run.append(at)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _line(line: Line, times: Sequence[float], x: Axis, y: Axis) -> list[Markup]:
    shapes = []
    for run in _runs(times, line.values):
        points: list[Point] = []
        for at in run:
            height = _y(line.values[at] or 0.0, y)
            if line.steps and at:
                points.append((_x(times[at - 1], x), height))
            points.append((_x(times[at], x), height))
        css = f"line c{line.colour}" + (" step" if line.steps else "")
        shapes.append(
            element("polyline", class_=css, points=_points(points), data_series=line.name)
        )
        if len(points) == 1:
            shapes.append(_circle(points[0], 2.5, f"dot c{line.colour}", None))
    return shapes


def _band(band: Band, times: Sequence[float], x: Axis, y: Axis, css: str = "band") -> list[Markup]:
    both = [
        None if low is None or high is None else low
        for low, high in zip(band.low, band.high, strict=True)
    ]
    shapes = []
    for run in _runs(times, both):
        there = [(_x(times[at], x), _y(band.high[at] or 0.0, y)) for at in run]
        back = [(_x(times[at], x), _y(band.low[at] or 0.0, y)) for at in reversed(run)]
        shapes.append(
            element(
                "polygon",
                class_=f"{css} c{band.colour}",
                points=_points([*there, *back]),
                data_series=band.name,
            )
        )
    return shapes


def _circle(centre: Point, radius: float, css: str, label: str | None) -> Markup:
    title = () if label is None else (element("title", label),)
    return element(
        "circle", *title, class_=css, cx=f"{centre[0]:.2f}", cy=f"{centre[1]:.2f}", r=f"{radius:g}"
    )


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)


# Frame
# --------------------------------------------------------------------------------------------------


def _drawing(x: Axis, y: Axis, shapes: Sequence[Markup], marks: Sequence[Mark]) -> list[Markup]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick, label in zip(y.ticks, y.labels, strict=True):
        at = f"{_y(tick, y):.2f}"
        parts.append(element("line", class_="grid", x1=LEFT, x2=right, y1=at, y2=at))
        parts.append(element("text", label, class_="tick-y", x=LEFT - 8, y=at, dy="0.35em"))
    for tick, label in zip(x.ticks, x.labels, strict=True):
        at = f"{_x(tick, x):.2f}"
        parts.append(element("line", class_="axis", x1=at, x2=at, y1=bottom, y2=bottom + 4))
        parts.append(element("text", label, class_="tick-x", x=at, y=bottom + 20))
    parts.append(element("line", class_="axis", x1=LEFT, x2=right, y1=bottom, y2=bottom))
    parts.append(
        element(
            "text",
            f"time since the start ({x.unit})",
            class_="name",
            x=(LEFT + right) / 2,
            y=HEIGHT - 6,
        )
    )
    return [*parts, *shapes, *_marks(marks, x)]


def _marks(marks: Sequence[Mark], axis: Axis) -> list[Markup]:
    """Those within a pixel of each other share a line, which names them all."""
    columns: dict[int, list[str]] = {}
    for mark in marks:
        if axis.low <= mark.t <= axis.high:
            columns.setdefault(round(_x(mark.t, axis)), []).append(mark.label)
    return [
        element(
            "line",
            element("title", "; ".join(names)),
            class_="mark",
            x1=at,
            x2=at,
            y1=TOP,
            y2=HEIGHT - BOTTOM,
        )
        for at, names in columns.items()
    ]


def _figure(
    *,
    key: str,
    title: str,
    unit: str,
    words: str,
    swatches: Sequence[tuple[str, str]] = (),
    drawing: Sequence[Markup] | None = None,
) -> Markup:
    caption = element(
        "figcaption", element("strong", title), " ", element("span", unit, class_="unit")
    )
    if drawing is None:
        return element("figure", caption, element("p", words, class_="nothing"), id=key)
    legend = [
        element("li", element("span", class_=f"swatch {css}", aria_hidden="true"), name)
        for name, css in swatches
    ]
    picture = element(
        "svg",
        element("title", f"{title}, {unit}", id=f"{key}-title"),
        element("desc", words, id=f"{key}-text"),
        joined(drawing),
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-text",
    )
    return element("figure", caption, element("ul", *legend, class_="legend"), picture, id=key)


def _words(lines: Sequence[Line], band: Band | None, dots: Sequence[Dot], dots_name: str) -> str:
    said = []
    for line in lines:
        known = [value for value in line.values if value is not None]
        if known:
            said.append(
                f"{line.name}: first {known[0]:.4g}, last {known[-1]:.4g}, least "
                f"{min(known):.4g}, greatest {max(known):.4g}."
            )
        else:
            said.append(f"{line.name}: none.")
    if (
        band is not None
        and (low := [v for v in band.low if v is not None])
        and (high := [v for v in band.high if v is not None])
    ):
        said.append(f"{band.name}: from {min(low):.4g} to {max(high):.4g}.")
    if dots:
        said.append(f"{dots_name}: {len(dots)}, the last {dots[-1].value:.4g}.")
    return " ".join(said)
