"""Renders the report's pages: one file each, nothing loaded from anywhere."""

from __future__ import annotations

from pathlib import Path

import jinja2

from benchmarks.stats.bootstrap import Interval
from benchmarks.stats.summary import Quantiles


def render(template: str, **values: object) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"share": _share, "q": _quantile, "range": _range, "ms": format_ms}
    return environment.get_template(template).render(**values)


def format_ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _share(found: Interval | None) -> str:
    return "" if found is None else f"{found.estimate:.1%} ({found.low:.0%}–{found.high:.0%})"


def _quantile(found: Quantiles | None, name: str) -> str:
    return "" if found is None else format_ms(getattr(found, name))


def _range(found: Interval | None) -> str:
    return "" if found is None else f"({format_ms(found.low)}–{format_ms(found.high)})"
