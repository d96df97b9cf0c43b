"""Scaling containers, as far as it can be told without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.docker_plan import (
    NUMBER_LABEL,
    REPLACE_LABEL,
    ScalePlan,
    ServiceContainer,
    copied_config,
    copied_name,
    plan_scale,
)
from cluster.errors import ClusterError


def running(*numbers: int) -> list[ServiceContainer]:
    return [ServiceContainer(f"id-{number}", number, True) for number in numbers]


def stopped(*numbers: int) -> list[ServiceContainer]:
    return [ServiceContainer(f"id-{number}", number, False) for number in numbers]


def test_more_are_made_under_the_lowest_free_numbers() -> None:
    assert plan_scale("decode", running(1, 3), 5) == ScalePlan(create=(2, 4, 5))


def test_stopped_ones_are_started_before_new_ones_are_made() -> None:
    assert plan_scale("decode", running(1) + stopped(2), 3) == ScalePlan(start=("id-2",), create=(3,))


def test_the_highest_numbers_go_first() -> None:
    assert plan_scale("decode", running(3, 1, 2), 1) == ScalePlan(remove=("id-2", "id-3"))


def test_a_running_one_is_kept_before_a_stopped_one_of_a_lower_number() -> None:
    assert plan_scale("decode", stopped(1) + running(2), 1) == ScalePlan(remove=("id-1",))


def test_the_last_one_is_stopped_but_stays_to_be_copied_from() -> None:
    assert plan_scale("prefill", running(1, 2), 0) == ScalePlan(remove=("id-2",), stop=("id-1",))
    assert plan_scale("prefill", stopped(1), 0) == ScalePlan()
    assert plan_scale("prefill", stopped(1), 1) == ScalePlan(start=("id-1",))


def test_without_any_there_is_nothing_to_copy() -> None:
    assert plan_scale("prefill", [], 0) == ScalePlan()
    with pytest.raises(ClusterError, match="prefill: there is no container to copy"):
        plan_scale("prefill", [], 2)


@given(
    numbers=st.dictionaries(st.integers(1, 12), st.booleans(), min_size=1, max_size=8),
    wanted=st.integers(0, 12),
)
def test_the_plan_ends_with_as_many_running_as_wanted(numbers: dict[int, bool], wanted: int) -> None:
    containers = [ServiceContainer(f"id-{number}", number, is_running) for number, is_running in numbers.items()]
    plan = plan_scale("decode", containers, wanted)
    before = {container.container_id for container in containers if container.running}
    gone = set(plan.remove) | set(plan.stop)
    assert len((before | set(plan.start)) - gone) + len(plan.create) == wanted
    assert not set(plan.start) & gone
    assert not set(plan.create) & set(numbers)
    assert not (plan.create and gone), "nobody is drained while others are made"
    assert len(containers) - len(plan.remove) + len(plan.create) >= 1


def test_a_copy_has_nothing_that_belongs_to_its_template_alone() -> None:
    template: dict[str, Any] = {
        "Id": "0123456789abcdef",
        "Name": "/kvrelay-decode-1",
        "Config": {
            "Hostname": "0123456789ab",
            "Image": "kvrelay-worker",
            "Env": ["KVRELAY_DEVICE=cpu"],
            "Labels": {NUMBER_LABEL: "1", REPLACE_LABEL: "decode-1", "mine": "x"},
        },
        "HostConfig": {"ReadonlyRootfs": True},
        "NetworkSettings": {
            "Networks": {
                "kvrelay_cluster": {"Aliases": ["kvrelay-decode-1", "decode", "0123456789ab"], "IPAddress": "10.0.0.2"}
            }
        },
    }
    config = copied_config(template, 3, "sha256:f")
    assert config == {
        "Image": "sha256:f",
        "Env": ["KVRELAY_DEVICE=cpu"],
        "Labels": {NUMBER_LABEL: "3", "mine": "x"},
        "HostConfig": {"ReadonlyRootfs": True},
        "NetworkingConfig": {"EndpointsConfig": {"kvrelay_cluster": {"Aliases": ["kvrelay-decode-3", "decode"]}}},
    }
    assert template["Config"]["Labels"][NUMBER_LABEL] == "1"


def test_a_chosen_host_name_is_kept() -> None:
    template: dict[str, Any] = {
        "Id": "0123456789abcdef",
        "Name": "/one",
        "Config": {"Hostname": "chosen", "Labels": {}},
        "HostConfig": {},
        "NetworkSettings": {"Networks": {}},
    }
    assert copied_config(template, 2, "image")["Hostname"] == "chosen"
    assert copied_name("one", 2) == "one-2"
