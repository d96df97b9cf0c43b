"""Two runs of an experiment side by side."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.errors import SpecError
from benchmarks.experiments.results import Manifest, Results
from benchmarks.report.figure import PALETTE, grid, style, svg_text
from benchmarks.report.page import render
from benchmarks.report.plot_tails import distribution
from benchmarks.report.study import Group, Study, pooled
from benchmarks.report.tables import ComparisonRow, compare_groups, goodputs_of
from benchmarks.stats.request_metrics import gaps_s, ttft_s

MAX_FIGURES = 6


def write_comparison(a: Results, b: Results, name_a: str, name_b: str, target: Path) -> Table:
    """Write the page, and return the same table for the terminal.

    Raises:
        SpecError: the two have no topology at an equal point in common.
    """
    study_a, study_b = Study(a), Study(b)
    pairs = _pairs(study_a, study_b)
    if not pairs:
        raise SpecError("the two runs have no topology in common at an equal point of an equal part")
    rows = [row for one, other in pairs for row in compare_groups(study_a, one, study_b, other)]
    page = render(
        "compare.html.j2",
        title=f"{name_a} beside {name_b}",
        name_a=name_a,
        name_b=name_b,
        a=a.manifest,
        b=b.manifest,
        warnings=warnings(a.manifest, b.manifest),
        comparisons=rows,
        goodputs=_goodputs(study_a, study_b),
        figures=[_figure(study_a, one, study_b, other) for one, other in pairs[:MAX_FIGURES]],
    )
    target.write_text(page, encoding="utf-8")
    return _table(rows)


def warnings(a: Manifest, b: Manifest) -> list[str]:
    """What makes the two hard to compare."""
    found = []
    if a.machine.cpu != b.machine.cpu or a.machine.cpus != b.machine.cpus:
        found.append("They were made on different machines or CPUs.")
    if a.experiment.model != b.experiment.model:
        found.append("They were made with different models.")
    if a.experiment.seed != b.experiment.seed or a.experiment.parts != b.experiment.parts:
        found.append("Their workloads or seeds differ, so they did not serve the same requests.")
    if a.versions != b.versions:
        names = sorted(name for name in {**a.versions, **b.versions} if a.versions.get(name) != b.versions.get(name))
        found.append(f"Versions differ: {', '.join(names)}.")
    if not (a.complete and b.complete):
        found.append("At least one of them was interrupted.")
    return found


def _pairs(study_a: Study, study_b: Study) -> list[tuple[Group, Group]]:
    others = {(group.part.name, group.point, group.topology): group for group in study_b.groups if not group.part.search}
    keys = [(group, (group.part.name, group.point, group.topology)) for group in study_a.groups if not group.part.search]
    return [(group, others[key]) for group, key in keys if key in others]


def _goodputs(study_a: Study, study_b: Study) -> list[dict[str, object]]:
    theirs = {(one.part, one.topology, one.prompt_tokens): one for one in goodputs_of(study_b)}
    rows: list[dict[str, object]] = []
    for one in goodputs_of(study_a):
        other = theirs.get((one.part, one.topology, one.prompt_tokens))
        if other is not None:
            rows.append(
                {
                    "part": one.part,
                    "topology": one.topology,
                    "prompt": one.prompt_tokens,
                    "a": f"{one.goodput.estimate:.2f} ({one.brackets})",
                    "b": f"{other.goodput.estimate:.2f} ({other.brackets})",
                }
            )
    return rows


def _figure(study_a: Study, a: Group, study_b: Study, b: Group) -> str:
    with style():
        figure, rows = grid(1, 2, 2.8)
        for study, group, colour, name in ((study_a, a, PALETTE[0], "A"), (study_b, b, PALETTE[1], "B")):
            distribution(rows[0][0], pooled(study.values(group, ttft_s)) * 1e3, colour, name)
            distribution(rows[0][1], pooled(study.series(group, gaps_s)) * 1e3, colour, name)
        rows[0][0].set(title=f"{a.topology}, {a.part.name}, {a.label()}: TTFT", xlabel="ms", ylabel="share at or below")
        rows[0][1].set(title="ITL", xlabel="ms")
        rows[0][0].legend()
    return svg_text(figure)


def _table(rows: list[ComparisonRow]) -> Table:
    table = Table("part", "at", "topology", "metric", "A / B", "95 % interval", "", box=None, pad_edge=False)
    for row in rows:
        verdict = ("faster" if row.ratio < 1 else "slower") if row.differs else "no clear difference"
        table.add_row(
            row.part, row.point, row.topology, row.metric, f"{row.ratio:.2f}", f"{row.low:.2f} – {row.high:.2f}", verdict
        )
    return table
