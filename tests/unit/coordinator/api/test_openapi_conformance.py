"""Schemathesis against the server's own description: nothing that it can think of is a 5xx or an answer not described."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from scripted_generator import ScriptedGenerator

from coordinator.api.app import create_app
from coordinator.api.settings import ApiSettings
from coordinator.metrics import RequestMetrics
from coordinator.text_model import TextModel

NUM_EXAMPLES = {
    "POST /v1/completions": 800,
    "POST /v1/chat/completions": 800,
    "POST /tokenize": 300,
    "POST /detokenize": 200,
    "GET /v1/models/{model_id}": 100,
}
FEW = 5  # of routes that take nothing


@pytest.fixture
def schemathesis() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        return pytest.importorskip("schemathesis", reason="schemathesis is not installed")


def conform(operation: Any, cases: Any, checks: list[Any]) -> Counter[int]:
    """The statuses of all answers."""
    seen: Counter[int] = Counter()

    @settings(
        max_examples=NUM_EXAMPLES.get(operation.label, FEW),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(case=cases)
    def ask(case: Any) -> None:
        response = case.call()
        seen[response.status_code] += 1
        case.validate_response(response, checks=checks)

    ask()
    return seen


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.allow_leaks(reason="schemathesis keeps one event loop in a thread for the life of the process")
def test_2000_requests_made_of_our_own_description_are_answered_as_it_says(schemathesis: Any, text: TextModel) -> None:
    """1. Valid and invalid requests of every route. 2. Each answer has a status, a type and a form that are described; none
    is a 5xx. 3. Both kinds were really there, and every sequence that was accepted has ended."""
    script = ScriptedGenerator()
    metrics = RequestMetrics(CollectorRegistry())
    app = create_app(script, text, ApiSettings(), lambda: {"workers": []}, request_metrics=metrics)
    checks, modes = schemathesis.checks, schemathesis.GenerationMode
    wanted = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    statuses: dict[str, Counter[int]] = {}
    for result in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations():
        operation = result.ok()
        cases = operation.as_strategy(generation_mode=modes.POSITIVE)
        if operation.label in NUM_EXAMPLES:
            cases = st.one_of(cases, operation.as_strategy(generation_mode=modes.NEGATIVE))
        statuses[operation.label] = conform(operation, cases, wanted)
    print(statuses)
    assert sum(count for seen in statuses.values() for count in seen.values()) >= 2000
    for label in ("POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize"):
        assert statuses[label][200] > 20, statuses
        assert statuses[label][400] > 20, statuses
    assert script.num_live == 0
