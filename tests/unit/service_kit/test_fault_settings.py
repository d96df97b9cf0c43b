"""Fault injection is off unless it is asked for, and then it is said loudly; a rule that means nothing stops the start."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from decode_service.settings import DecodeSettings
from prefill_service.settings import PrefillSettings
from service_kit.errors import SettingsError
from service_kit.settings import load_settings
from service_kit.worker_settings import WorkerSettings
from service_kit.worker_setup import fault_plan, open_transports
from transport.faults import FaultyTransport
from transport.options import TransportOptions


@pytest.mark.parametrize("settings_type", [PrefillSettings, DecodeSettings])
def test_a_wrong_rule_stops_the_start_with_its_name(settings_type: type[PrefillSettings | DecodeSettings]) -> None:
    section = settings_type.__name__.removesuffix("Settings").lower()
    for variable in ("KVRELAY_FAULTS", f"KVRELAY_{section.upper()}_FAULTS"):
        with pytest.raises(SettingsError) as refused:
            load_settings(settings_type, section, overrides={}, environ={variable: "drop:send,explode:put"})
        assert "faults" in str(refused.value)
        assert "explode" in str(refused.value)
    read = load_settings(settings_type, section, overrides={}, environ={"KVRELAY_FAULTS": "drop:send:nth=1, cut:put"})
    assert read.worker.faults == ("drop:send:nth=1", "cut:put")


async def test_without_the_settings_no_transport_is_wrapped(caplog: pytest.LogCaptureFixture) -> None:
    assert fault_plan(WorkerSettings()) is None
    async with AsyncExitStack() as stack:
        opened = open_transports(stack, ["inproc"], TransportOptions(), fault_plan(WorkerSettings()))
        assert not isinstance(opened["inproc"], FaultyTransport)
    assert caplog.records == []


@pytest.mark.parametrize("settings", [WorkerSettings(faults=("drop:put",)), WorkerSettings(faults_file=Path("rules"))])
async def test_with_them_all_are_and_it_is_said_loudly(settings: WorkerSettings, caplog: pytest.LogCaptureFixture) -> None:
    plan = fault_plan(settings)
    assert plan is not None
    async with AsyncExitStack() as stack:
        opened = open_transports(stack, ["inproc", "zmq"], TransportOptions(), plan)
        assert all(isinstance(transport, FaultyTransport) for transport in opened.values())
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "FAULT INJECTION IS ON" in warning.getMessage()
