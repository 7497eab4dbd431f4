"""Pictures as SVG text: bars, lines, a time chart and a grid of ranks.

Every function is pure, escapes all text it is given and returns Markup. Colours are CSS classes (``s0`` to
``s7`` for series), so that one picture serves a light and a dark page; lengths are in SVG user units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 760
NUM_SERIES = 8

Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One piece of a stacked bar: a name, a value in the chart's unit, and its colour class."""

    label: str
    value: float
    css: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stacked bar. ``css`` is "predicted" (drawn lighter, outlined) or "measured"."""

    label: str
    parts: tuple[Part, ...]
    css: str = "measured"
    low: float | None = None
    high: float | None = None
    show_total: bool = True

    @property
    def total(self) -> float:
        """The bar's length: the sum of its parts."""
        return sum(p.value for p in self.parts)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: points (x, y); a y that is not finite breaks the curve."""

    label: str
    points: tuple[tuple[float, float], ...]
    css: str
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """One box of a time chart: row, start and end in the chart's unit of time."""

    row: int
    start: float
    end: float
    css: str
    label: str = ""
    tip: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a grid: two lines of text, colour classes, and the rank it stands for."""

    title: str
    subtitle: str
    css: str
    tip: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class Box:
    """A bordered group of cells (a node)."""

    label: str
    cells: tuple[Cell, ...]


def series(index: int) -> str:
    """Return the colour class of series ``index``; colours repeat after eight."""
    return f"s{index % NUM_SERIES}"


def _n(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def frame(
    body: Sequence[Markup | str],
    *,
    name: str,
    title: str,
    height: float,
    extra: str = "",
    width: float = WIDTH,
) -> Markup:
    """Return one accessible ``<svg>`` around ``body`` (already safe), titled for screen readers."""
    safe = escape(name)
    attributes = Markup(" {}").format(extra) if extra else Markup("")
    return Markup(
        '<svg viewBox="0 0 {w} {h}" role="img" aria-labelledby="{n}-title"{a}><title id="{n}-title">{t}</title>'
        "{b}</svg>"
    ).format(w=_n(width), h=_n(height), n=safe, t=title, b=Markup("").join(body), a=attributes)


def _text(x: float, y: float, text: str, *, css: str = "", anchor: str = "start") -> Markup:
    return Markup('<text x="{}" y="{}"{}{}>{}</text>').format(
        _n(x),
        _n(y),
        Markup(' class="{}"').format(css) if css else "",
        Markup(' text-anchor="{}"').format(anchor) if anchor != "start" else "",
        text,
    )


def _rect(
    x: float, y: float, w: float, h: float, css: str, tip: str = "", extra: Markup | str = ""
) -> Markup:
    head = Markup('<rect x="{}" y="{}" width="{}" height="{}" class="{}"{}').format(
        _n(x), _n(y), _n(max(w, 0.0)), _n(h), css, extra
    )
    return head + (Markup("><title>{}</title></rect>").format(tip) if tip else Markup("/>"))


def _rule(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>').format(
        _n(x1), _n(y1), _n(x2), _n(y2), css
    )


def nice_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Return about ``count`` round values that lie in [low, high]; one value when the range is empty."""
    if not high > low:
        return (low,)
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def log_ticks(low: float, high: float, base: int, count: int = 6) -> tuple[float, ...]:
    """Return powers of ``base`` (whole exponents) inside [low, high], thinned to about ``count``."""
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / count))
    return tuple(float(base) ** e for e in range(first, last + 1, stride))


def plain(value: float) -> str:
    """Return a number in at most four significant digits, with thousands separated by a narrow space."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2g}"
    if size >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.4g}"


def legend(items: Sequence[tuple[str, str]]) -> Markup:
    """Return a list of (colour class, meaning) with a swatch each."""
    rows = [
        Markup(
            '<li><svg viewBox="0 0 12 12" class="swatch" aria-hidden="true">'
            '<rect width="12" height="12" class="{}"/></svg>{}</li>'
        ).format(css, label)
        for css, label in items
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(rows))


def bars(
    rows: Sequence[Bar],
    *,
    name: str,
    title: str,
    x_label: str,
    format_value: Format,
    format_tick: Format,
    tick_unit: float = 1.0,
    marker: float | None = None,
    marker_label: str = "",
    dense: bool = False,
) -> Markup:
    """Return horizontal stacked bars over a shared axis that starts at 0.

    ``tick_unit`` makes ticks round in a display unit (2**20 for MiB). ``marker`` draws a vertical line (a
    capacity). A bar with ``low`` and ``high`` carries a whisker. ``dense`` halves the bars' height.
    """
    left, right, top = 172.0, 92.0, 8.0
    step, thick = (7.5, 6.0) if dense else (26.0, 18.0)
    highest = max(
        [b.total for b in rows] + [b.high for b in rows if b.high is not None] + [marker or 0.0], default=0.0
    )
    highest = highest if highest > 0 else 1.0
    scale = (WIDTH - left - right) / (highest * 1.02)
    bottom = top + step * len(rows)
    body: list[Markup] = []
    for tick in nice_ticks(0.0, highest / tick_unit, 5):
        x = left + tick * tick_unit * scale
        body += [
            _rule(x, top, x, bottom, "rule"),
            _text(x, bottom + 14, format_tick(tick), css="tick", anchor="middle"),
        ]
    for i, bar in enumerate(rows):
        y = top + i * step + (step - thick) / 2
        middle = y + thick / 2
        if bar.label:
            body.append(_text(left - 8, middle + (7 if dense else 4), bar.label, css="lab", anchor="end"))
        x = left
        for part in bar.parts:
            if part.value <= 0:
                continue
            wide = part.value * scale
            tip = f"{bar.label} {bar.css}: {part.label} {format_value(part.value)}"
            body.append(_rect(x, y, wide, thick, f"{part.css} {bar.css}", tip))
            x += wide
        if bar.low is not None and bar.high is not None:
            a, b = left + bar.low * scale, left + bar.high * scale
            body += [
                _rule(a, middle, b, middle, "whisker"),
                _rule(a, middle - 4, a, middle + 4, "whisker"),
                _rule(b, middle - 4, b, middle + 4, "whisker"),
            ]
            x = max(x, b)
        if bar.show_total:
            body.append(
                _text(
                    x + 6 if not dense else WIDTH - right + 6, middle + 4, format_value(bar.total), css="val"
                )
            )
    if marker is not None:
        x = left + marker * scale
        body += [
            _rule(x, top - 4, x, bottom, "marker"),
            _text(x - 4, bottom + 42, marker_label, css="tick", anchor="end"),
        ]
    body += [
        _rule(left, top, left, bottom, "axis"),
        _text((left + WIDTH - right) / 2, bottom + 30, x_label, css="tick", anchor="middle"),
    ]
    return frame(body, name=name, title=title, height=bottom + (48 if marker is not None else 36))


def lines(
    curves: Sequence[Line],
    *,
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    format_x: Format = plain,
    format_y: Format = plain,
    x_log: int = 0,
    y_log: int = 0,
    from_zero: bool = False,
    height: float = 240.0,
    width: float = WIDTH,
    x_unit: float = 1.0,
    y_unit: float = 1.0,
) -> Markup:
    """Return curves on shared axes; ``x_log``/``y_log`` give the base of a logarithmic axis (0: linear).

    ``x_unit``/``y_unit`` make linear ticks round in a display unit.
    """
    left, right, top = 84.0, 16.0, 12.0
    bottom = height - 44.0
    usable = [
        (x, y)
        for c in curves
        for x, y in c.points
        if math.isfinite(x) and math.isfinite(y) and (not x_log or x > 0) and (not y_log or y > 0)
    ]
    if not usable:
        return frame(
            [_text(width / 2, height / 2, "no finite value", css="tick", anchor="middle")],
            name=name,
            title=title,
            height=height,
            width=width,
        )
    x_low, x_high = min(x for x, _ in usable), max(x for x, _ in usable)
    y_low, y_high = min(y for _, y in usable), max(y for _, y in usable)
    if from_zero and not y_log:
        y_low = min(0.0, y_low)
    if y_high == y_low:
        pad = abs(y_high) * 0.1 or 1.0
        y_low, y_high = (y_low / 2, y_high * 2) if y_log else (y_low - pad, y_high + pad)
    elif not y_log:
        y_high += 0.05 * (y_high - y_low)
    if x_high == x_low:
        x_low, x_high = (x_low / 2, x_high * 2) if x_log else (x_low - 1, x_high + 1)

    def place_x(x: float) -> float:
        share = (
            (math.log(x) - math.log(x_low)) / (math.log(x_high) - math.log(x_low))
            if x_log
            else (x - x_low) / (x_high - x_low)
        )
        return left + share * (width - left - right)

    def place_y(y: float) -> float:
        share = (
            (math.log(y) - math.log(y_low)) / (math.log(y_high) - math.log(y_low))
            if y_log
            else (y - y_low) / (y_high - y_low)
        )
        return bottom - share * (bottom - top)

    body: list[Markup] = []
    y_ticks = (
        log_ticks(y_low, y_high, y_log)
        if y_log
        else tuple(t * y_unit for t in nice_ticks(y_low / y_unit, y_high / y_unit, 4))
    )
    for tick in y_ticks:
        y = place_y(tick)
        body += [
            _rule(left, y, width - right, y, "rule"),
            _text(left - 6, y + 4, format_y(tick), css="tick", anchor="end"),
        ]
    x_ticks = (
        log_ticks(x_low, x_high, x_log)
        if x_log
        else tuple(t * x_unit for t in nice_ticks(x_low / x_unit, x_high / x_unit, 6 if width > 500 else 4))
    )
    for tick in x_ticks:
        x = place_x(tick)
        body += [
            _rule(x, bottom, x, bottom + 4, "axis"),
            _text(x, bottom + 17, format_x(tick), css="tick", anchor="middle"),
        ]
    body += [
        _rule(left, bottom, width - right, bottom, "axis"),
        _text((left + width - right) / 2, bottom + 36, x_label, css="tick", anchor="middle"),
        Markup(
            '<text transform="translate(13 {}) rotate(-90)" class="tick" text-anchor="middle">{}</text>'
        ).format(_n((top + bottom) / 2), y_label),
    ]
    for curve in curves:
        path: list[str] = []
        pen = "M"
        for x, y in curve.points:
            if not (math.isfinite(x) and math.isfinite(y)) or (x_log and x <= 0) or (y_log and y <= 0):
                pen = "M"
                continue
            path.append(f"{pen}{_n(place_x(x))} {_n(place_y(y))}")
            if curve.dots or len(curve.points) == 1:
                body.append(
                    Markup('<circle cx="{}" cy="{}" r="3" class="{}"><title>{}</title></circle>').format(
                        _n(place_x(x)),
                        _n(place_y(y)),
                        curve.css,
                        f"{curve.label}: {format_x(x)}, {format_y(y)}",
                    )
                )
            pen = "L"
        body.append(Markup('<path d="{}" class="curve {}"/>').format("".join(path), curve.css))
    return frame(body, name=name, title=title, height=height, width=width)


def gantt(
    rows: Sequence[str],
    spans: Sequence[Span],
    *,
    name: str,
    title: str,
    end: float,
    x_label: str,
    format_tick: Format,
    tick_unit: float = 1.0,
) -> Markup:
    """Return a time chart: one row a name, boxes over a shaded background (the shade is idle time).

    Boxes carry their text where it fits. Above 600 boxes those of one colour are joined to one path, which
    keeps a page of long schedules small.
    """
    left, right, top, thick = 92.0, 12.0, 6.0, 24.0
    step = thick + 6.0
    bottom = top + step * len(rows)
    scale = (WIDTH - left - right) / end if end > 0 else 1.0
    body: list[Markup] = []
    for i, row in enumerate(rows):
        y = top + i * step
        body += [
            _text(left - 8, y + thick / 2 + 4, row, css="lab", anchor="end"),
            _rect(left, y, end * scale, thick, "idle", f"{row}: idle (bubble) where no box is drawn"),
        ]
    if len(spans) <= 600:
        for span in spans:
            x, y, wide = left + span.start * scale, top + span.row * step, (span.end - span.start) * scale
            body.append(_rect(x, y, wide, thick, f"box {span.css}", span.tip))
            if span.label and wide >= 6.5 * len(span.label) + 2:
                body.append(_text(x + wide / 2, y + thick / 2 + 4, span.label, css="in", anchor="middle"))
    else:
        by_colour: dict[str, list[str]] = {}
        for span in spans:
            x, y, wide = left + span.start * scale, top + span.row * step, (span.end - span.start) * scale
            by_colour.setdefault(span.css, []).append(
                f"M{x:.2f} {_n(y)}h{max(wide - 0.3, 0.2):.2f}v{_n(thick)}h-{max(wide - 0.3, 0.2):.2f}z"
            )
        for css, pieces in by_colour.items():
            body.append(Markup('<path d="{}" class="{}"/>').format("".join(pieces), css))
    for tick in nice_ticks(0.0, end / tick_unit, 6):
        x = left + tick * tick_unit * scale
        body += [
            _rule(x, bottom, x, bottom + 4, "axis"),
            _text(x, bottom + 17, format_tick(tick), css="tick", anchor="middle"),
        ]
    body += [
        _rule(left, bottom, WIDTH - right, bottom, "axis"),
        _text((left + WIDTH - right) / 2, bottom + 34, x_label, css="tick", anchor="middle"),
    ]
    return frame(body, name=name, title=title, height=bottom + 40)


def grid(boxes: Sequence[Box], *, name: str, title: str, axis: str) -> Markup:
    """Return ranks as cells inside bordered boxes (nodes); ``axis`` is the axis whose colours show first."""
    largest = max((len(b.cells) for b in boxes), default=1)
    per_row = min(8, largest)
    cell_w = min(118.0, (WIDTH - 24.0) / per_row - 4)
    cell_h, label_h, pad = 40.0, 18.0, 6.0
    box_w = per_row * (cell_w + 4) - 4 + 2 * pad
    across = max(1, int((WIDTH + 10) // (box_w + 10)))
    body: list[Markup] = []
    y, row_height = 2.0, 0.0
    for i, box in enumerate(boxes):
        column = i % across
        if column == 0 and i:
            y += row_height + 10
            row_height = 0.0
        num_rows = max(1, math.ceil(len(box.cells) / per_row))
        box_h = label_h + num_rows * (cell_h + 4) - 4 + 2 * pad
        row_height = max(row_height, box_h)
        x = 1 + column * (box_w + 10)
        body += [
            _rect(x, y, box_w, box_h, "node"),
            _text(x + pad, y + 15, box.label, css="tick"),
        ]
        for j, cell in enumerate(box.cells):
            cx = x + pad + (j % per_row) * (cell_w + 4)
            cy = y + label_h + pad - 2 + (j // per_row) * (cell_h + 4)
            body.append(
                Markup('<g class="cell" data-rank="{}">{}{}{}</g>').format(
                    cell.rank,
                    _rect(cx, cy, cell_w, cell_h, f"cellbox {cell.css}", cell.tip),
                    _text(cx + cell_w / 2, cy + 17, cell.title, css="cellname", anchor="middle"),
                    _text(cx + cell_w / 2, cy + 32, cell.subtitle, css="cellsub", anchor="middle"),
                )
            )
    height = y + row_height + 4
    return frame(body, name=name, title=title, height=height, extra=Markup('data-axis="{}"').format(axis))
