"""The lags of the staleness lab as a picture: plain characters for the terminal, SVG for a page.

Both show the area under the held-out curve with its interval, a row for each preset and a panel for each lag,
best first at the largest lag that has a bar; the SVG has the curves themselves below. Made from the report
alone (its `lags`), so a stored report can be drawn again. The default is blue, the baseline red, the rest
grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["summary", "svg", "terminal"]

Report = dict[str, Any]

_COLUMNS = 44
"""Of a terminal plot's axis."""
_LABEL_WIDTH, _PANEL_WIDTH, _GAP, _ROW, _TOP = 130, 150, 16, 20, 46
_CURVE_HEIGHT, _MARGIN = 150, 12
_COLOURS = {"default": "#1f6fb4", "baseline": "#c0392b", "": "#6b7280"}
_STYLE = "font-family='system-ui, sans-serif' font-size='11'"


def terminal(report: Report) -> str:
    """One block for each lag: the preset, its interval on a common axis, area, share of lag 0's."""
    low, high = _range(report)
    lines = []
    for place, lag in enumerate(_lags(report)):
        lines.append(f"lag {lag:<12} {low:<{_COLUMNS // 2}.2f}{high:>{_COLUMNS // 2}.2f}  area   of lag 0")
        for row in _ranked(report):
            case = row["lags"][place]
            if case["area"] is None:
                lines.append(f"{row['preset'][:16]:<16} (not all runs were made)")
                continue
            area, retained = case["area"], case["retained"]
            share = "" if retained is None else f"   {retained['value']:.0%}"
            collapsed = f"   {case['collapsed']} collapsed" if case["collapsed"] else ""
            bar = _bar(area, low, high)
            lines.append(f"{row['preset'][:16]:<16} {bar}  {area['value']:.3f}{share}{collapsed}")
        lines.append("")
    return "\n".join(lines)


def summary(report: Report) -> Report:
    """What of a whole report is no picture, shortened for a table."""
    lags, swarm = report["lags"], report["swarm"]
    rows: Report = {}
    if lags is not None:
        verdict = lags["verdict"]
        rows["learning rates"] = {row["preset"]: f"{row['learning_rate']:g}" for row in lags["presets"]}
        rows["verdict"] = verdict and {
            "lag": verdict["lag"],
            "default keeps": _interval(verdict["default_retained"]),
            "baseline keeps": _interval(verdict["baseline_retained"]),
            "default above baseline": _interval(verdict["default_over_baseline"]),
            "holds": verdict["holds"],
        }
        rows["cost"] = lags["cost"]
    for row in swarm["variants"] if swarm is not None else ():
        rows[f"swarm: {row['variant']}"] = row["area"] and {
            "area": _interval(row["area"]),
            **{
                f"above {name}": _interval(row[f"against_{name}"])
                for name in ("solo_4", "solo_8")
                if row[f"against_{name}"] is not None and name != row["variant"]
            },
        }
    kept = ("made", "reused", "failures", "wall_s", "cores", "load_average")
    return {**rows, **{name: report[name] for name in kept}}


def svg(report: Report) -> str:
    """A whole document."""
    lags, rows = _lags(report), _ranked(report)
    width = _LABEL_WIDTH + len(lags) * (_PANEL_WIDTH + _GAP) + _MARGIN
    curves_top = _TOP + len(rows) * _ROW + 60
    height = curves_top + _CURVE_HEIGHT + 40
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {_STYLE}>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        _text(_MARGIN, 18, "Area under the held-out curve, 95 % intervals over seeds", size=13),
        *(
            _text(
                _LABEL_WIDTH - 8, _row_y(number) + 4, row["preset"], anchor="end", fill=_colour(report, row)
            )
            for number, row in enumerate(rows)
        ),
    ]
    for place, lag in enumerate(lags):
        left = _LABEL_WIDTH + place * (_PANEL_WIDTH + _GAP)
        parts.extend(_areas(report, rows, place, left, f"lag {lag}"))
        parts.extend(_curves(report, rows, place, left, curves_top))
    parts.append(_text(_MARGIN, curves_top + 12, "Held-out reward"))
    parts.append(_text(_MARGIN, curves_top + 28, "over the steps"))
    return "\n".join([*parts, "</svg>", ""])


def _areas(report: Report, rows: Sequence[Report], place: int, left: int, title: str) -> Iterator[str]:
    low, high = _range(report)
    bottom = _TOP + len(rows) * _ROW

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * _PANEL_WIDTH

    yield _text(left, _TOP - 10, title)
    for tick in _ticks(low, high):
        yield _line(x(tick), _TOP, x(tick), bottom, "#e5e7eb")
        yield _text(x(tick), bottom + 14, f"{tick:.1f}", anchor="middle", fill="#6b7280")
    for number, row in enumerate(rows):
        area = row["lags"][place]["area"]
        if area is None:
            continue
        y, colour = _row_y(number), _colour(report, row)
        yield _line(x(area["low"]), y, x(area["high"]), y, colour, 2)
        yield f"<circle cx='{x(area['value']):.1f}' cy='{y}' r='3.5' fill='{colour}'/>"


def _curves(report: Report, rows: Sequence[Report], place: int, left: int, top: int) -> Iterator[str]:
    drawn = [row for row in reversed(rows) if row["lags"][place]["area"] is not None]
    drawn.sort(key=lambda row: row["preset"] in {report["default"], report["baseline"]})
    heights = [
        height for row in report["presets"] for case in row["lags"] for _, height in case.get("curve", ())
    ]
    if not drawn or not heights:
        return
    low, high = _padded(min(heights), max(heights))
    steps = max(case[0] for row in drawn for case in row["lags"][place]["curve"])
    bottom = top + _CURVE_HEIGHT
    for tick in _ticks(low, high):
        y = bottom - (tick - low) / (high - low) * _CURVE_HEIGHT
        yield _line(left, y, left + _PANEL_WIDTH, y, "#e5e7eb")
        if place == 0:
            yield _text(left - 4, y + 4, f"{tick:.1f}", anchor="end", fill="#6b7280")
    for row in drawn:
        colour = _colour(report, row)
        marked = colour != _COLOURS[""]
        points = " ".join(
            f"{left + at / steps * _PANEL_WIDTH:.1f},{bottom - (y - low) / (high - low) * _CURVE_HEIGHT:.1f}"
            for at, y in row["lags"][place]["curve"]
        )
        yield (
            f"<polyline points='{points}' fill='none' stroke='{colour}' "
            f"stroke-width='{1.8 if marked else 0.8}' stroke-opacity='{1 if marked else 0.6}'/>"
        )
    yield _text(left, bottom + 14, "0", fill="#6b7280")
    yield _text(left + _PANEL_WIDTH, bottom + 14, f"{steps} steps", anchor="end", fill="#6b7280")


def _interval(each: dict[str, float]) -> str:
    return f"{each['value']:.3f} ({each['low']:.3f} to {each['high']:.3f})"


def _bar(area: dict[str, float], low: float, high: float) -> str:
    def column(value: float) -> int:
        return min(_COLUMNS - 1, max(0, round((value - low) / (high - low) * (_COLUMNS - 1))))

    cells = [" "] * _COLUMNS
    for at in range(column(area["low"]), column(area["high"]) + 1):
        cells[at] = "-"
    cells[column(area["value"])] = "o"
    return "".join(cells)


def _lags(report: Report) -> list[str]:
    return [case["lag"] for case in report["presets"][0]["lags"]]


def _ranked(report: Report) -> list[Report]:
    """Best first at the lag of the verdict, else at the last one."""
    lags = _lags(report)
    verdict = report["verdict"]
    place = lags.index(verdict["lag"]) if verdict else len(lags) - 1

    def height(row: Report) -> float:
        area = row["lags"][place]["area"]
        return -1.0 if area is None else area["value"]

    return sorted(report["presets"], key=height, reverse=True)


def _range(report: Report) -> tuple[float, float]:
    areas = [case["area"] for row in report["presets"] for case in row["lags"] if case["area"] is not None]
    if not areas:
        return 0.0, 1.0
    return _padded(min(each["low"] for each in areas), max(each["high"] for each in areas))


def _padded(low: float, high: float) -> tuple[float, float]:
    """Outwards to whole twentieths."""
    return int(low * 20) / 20, (int(high * 20) + 1) / 20


def _ticks(low: float, high: float) -> list[float]:
    return [tick / 10 for tick in range(11) if low - 1e-9 <= tick / 10 <= high + 1e-9]


def _row_y(number: int) -> int:
    return _TOP + number * _ROW + _ROW // 2


def _colour(report: Report, row: Report) -> str:
    role = {report["default"]: "default", report["baseline"]: "baseline"}.get(row["preset"], "")
    return _COLOURS[role]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' "
        f"stroke='{colour}' stroke-width='{width}'/>"
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#111827", size: int = 11
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{fill}' font-size='{size}'>"
        f"{escape(text)}</text>"
    )
