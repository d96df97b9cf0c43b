"""The report on results that are known: every plot, every table, nothing left out, nothing loaded from elsewhere."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from bench_results import GOODPUTS, ITL_S, made_up_results, written
from PIL import Image

from benchmarks.errors import SpecError
from benchmarks.experiments.results import ResultFolder, read_results
from benchmarks.report.compare import warnings, write_comparison
from benchmarks.report.study import Study
from benchmarks.report.tables import comparisons_of, rows_of
from benchmarks.report.write import PLOTS, make_plots, write_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ResultFolder:
    made = written(tmp_path_factory.mktemp("report") / "out", made_up_results())
    write_report(read_results(made.directory), made)
    return made


@pytest.fixture(scope="module")
def page(folder: ResultFolder) -> str:
    return (folder.directory / "report.html").read_text()


def test_what_was_written_is_read_again(folder: ResultFolder) -> None:
    made, found = made_up_results(), read_results(folder.directory)
    assert found.runs == made.runs
    assert found.manifest == made.manifest
    assert found.requests["0001"] == made.requests["0001"]


def test_every_plot_is_there_as_svg_and_png_and_on_the_page(folder: ResultFolder, page: str) -> None:
    names = sorted(path.name for path in folder.plots.iterdir())
    assert len(names) == 2 * len(PLOTS)
    assert page.count("<svg") == len(PLOTS)
    assert "Not in this experiment" not in page
    for path in folder.plots.glob("*.png"):
        with Image.open(path) as image:
            assert image.width > 1000
            assert len(image.convert("L").getcolors(256) or range(99)) > 20, f"{path.name} is empty"


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page) == []
    assert "@import" not in page
    assert "Made up &lt;with a tag&gt;" in page
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL).lower().split()


def test_what_does_not_count_is_named(page: str) -> None:
    assert "requests were sent late: p99 80 ms" in page
    assert "vllm-cpu was skipped: it is not there" in page
    assert "503 worker_failed" in page
    assert "saturated" in page


def test_the_page_says_how_it_was_made(page: str) -> None:
    for text in ("kvrelay bench run made-up", "kvrelay up --prefill 1 --decode 1", "a CPU", "abc", "python 3.11"):
        assert text in page


def test_the_summary_has_a_row_per_run_and_stream(folder: ResultFolder) -> None:
    with (folder.directory / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    runs = read_results(folder.directory).runs
    parts = {"mixed": 2, "lengths": 1, "kill": 1}
    assert len(rows) == sum(parts[run.part] for run in runs)
    assert {"itl_p99_ms", "ttft_p90_ms", "attainment", "invalid", "saturated", "tbt_p95_ms"} <= rows[0].keys()
    assert [row["invalid"] for row in rows if row["run"] == "9999"] == [
        "requests were sent late: p99 80 ms, allowed 50 ms"
    ] * 2


def test_figures_are_those_that_were_put_in() -> None:
    rows = [row for row in rows_of(Study(made_up_results())) if row.part == "mixed"]
    for row in rows:
        assert row.itl is not None
        assert row.itl_p99 is not None
        assert row.itl.mean == pytest.approx(ITL_S[row.topology] * 1e3, rel=0.1)
        assert row.itl_p99.low < row.itl.p99 < row.itl_p99.high
    assert {(row.topology, row.repeats) for row in rows} == {(name, 2) for name in ITL_S}


def test_a_difference_is_found_against_the_baseline() -> None:
    rows = [row for row in comparisons_of(Study(made_up_results())) if (row.part, row.metric) == ("mixed", "p99 ITL")]
    split = [row for row in rows if row.topology == "1p1d"]
    assert len(split) == 2
    for row in split:
        assert row.differs
        assert row.ratio == pytest.approx(0.5, rel=0.2)
        assert "is lower" in row.sentence()
    assert {row.topology for row in rows} == {"1p1d", "1c2"}


def test_a_goodput_of_nothing_stands_as_below(page: str) -> None:
    assert GOODPUTS["1c2"] is None
    assert "below 8" in page
    assert "4 to 8" in page


def test_an_experiment_with_nothing_in_it_says_so(tmp_path: Path) -> None:
    results = made_up_results()
    results.runs, results.requests, results.transport, results.manifest.goodputs = [], {}, [], []
    made = written(tmp_path / "out", results)
    text = write_report(read_results(made.directory), made).read_text()
    assert text.count("Not in this experiment") == len(PLOTS)
    assert all(plot.figure is None and plot.why for plot in make_plots(Study(results)))


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    """The second one has gaps twice as long: every ITL ratio says so, and no TTFT."""
    a, b = made_up_results(), made_up_results(slower=2.0)
    b.manifest.versions = {"python": "3.12"}
    table = write_comparison(a, b, "a", "b", tmp_path / "compare.html")
    text = (tmp_path / "compare.html").read_text()
    assert table.row_count > 20
    assert "Versions differ: python" in text
    assert "4.00 (4 to 8)" in text
    cells = dict(zip(table.columns[3].cells, table.columns[4].cells, strict=True))
    assert float(str(cells["p99 ITL"])) == pytest.approx(0.5, rel=0.2)
    assert warnings(a.manifest, a.manifest) == []


def test_runs_without_anything_in_common_are_refused(tmp_path: Path) -> None:
    a, b = made_up_results(), made_up_results()
    b.runs = []
    with pytest.raises(SpecError, match="no topology in common"):
        write_comparison(a, b, "a", "b", tmp_path / "compare.html")


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    written(tmp_path / "out", made_up_results())
    with pytest.raises(SpecError, match="holds the results of another run"):
        ResultFolder(tmp_path / "out").create()
    with pytest.raises(SpecError, match="no results that can be read"):
        read_results(tmp_path)
