"""From records to a report: CSV files, plots as SVG and PNG, and one page that holds everything."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from benchmarks.experiments.results import ResultFolder, Results
from benchmarks.report.figure import Colours, Plot, save, style
from benchmarks.report.page import render
from benchmarks.report.plot_maps import where_splitting_wins, workers
from benchmarks.report.plot_rates import attainment, per_core
from benchmarks.report.plot_stages import breakdown, transfers
from benchmarks.report.plot_tails import around_a_kill, distributions, over_time
from benchmarks.report.study import Study
from benchmarks.report.tables import comparisons_of, goodputs_of, rows_of, write_csvs

PLOTS = (attainment, distributions, over_time, breakdown, transfers, workers, per_core, where_splitting_wins, around_a_kill)
MAX_SENTENCES = 16
MAX_ERRORS = 8


def write_report(results: Results, folder: ResultFolder) -> Path:
    """Returns the page. Everything that it needs is in the results: a report can be made again at any time."""
    study = Study(results)
    comparisons = comparisons_of(study)
    write_csvs(study, comparisons, folder.directory)
    with style():
        plots = make_plots(study)
    shown = [
        {"key": one.key, "title": one.title, "reading": one.reading, "why": one.why, "svg": _saved(one, folder)}
        for one in plots
    ]
    clear = [one for one in comparisons if one.differs]
    clear.sort(key=lambda one: (one.metric != "p99 ITL", one.saturated))
    records = [record for requests in results.requests.values() for record in requests]
    errors = Counter(record.error for record in records if record.error)
    page = render(
        "page.html.j2",
        title=study.experiment.title,
        experiment=study.experiment,
        experiment_json=msgspec.json.format(msgspec.json.encode(study.experiment), indent=2).decode(),
        manifest=results.manifest,
        baseline=study.baseline,
        runs=results.runs,
        num_requests=len(records),
        sentences=[one.sentence() for one in clear[:MAX_SENTENCES]],
        even=[one.sentence() for one in comparisons if not one.differs],
        goodputs=goodputs_of(study),
        rows=rows_of(study),
        plots=shown,
        comparisons=comparisons,
        unusable=[run for run in results.runs if not run.usable],
        lateness=max((run.lateness_p99_ms or 0.0 for run in results.runs), default=0.0),
        client_cpu=max((run.client_cpu for run in results.runs), default=0.0),
        errors=errors.most_common(MAX_ERRORS),
    )
    target = folder.directory / "report.html"
    target.write_text(page, encoding="utf-8")
    return target


def make_plots(study: Study) -> list[Plot]:
    colours = Colours([one.name for one in study.manifest.topologies])
    return [make(study, colours) for make in PLOTS]


def _saved(plot: Plot, folder: ResultFolder) -> str:
    return "" if plot.figure is None else save(plot.figure, folder.plots, plot.key)
