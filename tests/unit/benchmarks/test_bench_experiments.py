"""Experiment files: the ready-made ones hold what was promised, and wrong ones are refused by name."""

from __future__ import annotations

import msgspec
import pytest
from bench_results import experiment

from benchmarks.errors import SpecError
from benchmarks.experiments.spec import load_experiment, ready_made
from benchmarks.load.records import Point
from benchmarks.topologies.spec import Kvrelay

MAX_MINUTES = {"smoke": 3, "interference": 12, "peers": 15}


def test_the_ready_made_ones_are_there() -> None:
    assert ready_made() == ["crossover", "failure", "interference", "peers", "ratio", "smoke", "transport"]


@pytest.mark.parametrize("name", ready_made())
def test_a_ready_made_one_is_whole(name: str) -> None:
    found = load_experiment(name)
    assert found.name == name
    assert found.title
    assert found.question.endswith((".", "?"))
    assert len({one.name for one in found.resolved_topologies()}) == len(found.topologies) >= 2
    assert found.planned_s / 60 <= MAX_MINUTES.get(name, 30)


def test_the_ratio_goes_up_to_eight_of_each() -> None:
    topologies = load_experiment("ratio").resolved_topologies()
    shapes = {(one.prefill, one.decode) for one in topologies if isinstance(one, Kvrelay)}
    assert shapes == {(prefill, decode) for prefill in (1, 2, 4, 8) for decode in (1, 2, 4, 8)}


def test_overrides_replace_top_level_fields() -> None:
    assert load_experiment("smoke", {"repeats": 7, "seed": 3}).repeats == 7


def test_randomness_is_the_same_for_every_topology_and_different_for_everything_else() -> None:
    spec = experiment()
    part, other = spec.parts[0], spec.parts[1]
    here = spec.entropy(part, Point(1.0), 0, 0)
    assert here == spec.entropy(part, Point(1.0), 0, 0)
    others = [
        spec.entropy(part, Point(2.0), 0, 0),
        spec.entropy(part, Point(1.0), 1, 0),
        spec.entropy(part, Point(1.0), 0, 1),
        spec.entropy(part, Point(1.0, 64), 0, 0),
        spec.entropy(other, Point(1.0), 0, 0),
        experiment(seed=6).entropy(part, Point(1.0), 0, 0),
    ]
    assert here not in others
    assert len({tuple(one) for one in others}) == len(others)


def test_the_varied_prompt_is_that_of_the_judged_streams() -> None:
    spec = experiment()
    chat, long = spec.parts[0].streams_at(Point(1.0, 77))
    assert chat.prompt.tokens == 77  # type: ignore[union-attr]
    assert long.prompt.tokens == 128  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"baseline": "9p9d"}, "baseline: 9p9d is none of the topologies"),
        ({"topologies": ["2c", "2c"]}, "topologies: two have one name"),
        ({"target": 1.5}, r"\$\.target"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"slo": None}, "searches a goodput, which needs an slo"),
        ({"parts": [{"name": "a", "streams": []}]}, r"\$\.parts"),
        ({"parts": [{"name": "a", "streams": [{}]}]}, "give either loads or a search"),
        ({"parts": [{"name": "a", "loads": [1.0], "streams": [{"judged": False}]}]}, "one of them must be judged"),
        ({"parts": [{"name": "a", "loads": [1.0], "streams": [{"arrivals": {"process": "poisson"}}]}]}, "rate"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=reason):
        experiment(**changes)


def test_a_file_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(SpecError, match="there is no experiment 'smokey'; there are crossover"):
        load_experiment("smokey")
    with pytest.raises(SpecError, match=r"nowhere\.toml"):
        load_experiment("nowhere.toml")
