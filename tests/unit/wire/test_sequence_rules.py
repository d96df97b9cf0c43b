"""The one rule by which every process decides that a token was the last."""

from __future__ import annotations

import pytest

from wire.sequence import FinishReason, StopRules, finish_reason_after

EOS = 2


@pytest.mark.parametrize(
    ("rules", "num_output", "token", "room", "expected"),
    [
        (StopRules(3, eos_token_ids=(EOS,)), 1, 5, 9, None),
        (StopRules(3, eos_token_ids=(EOS,)), 1, EOS, 9, FinishReason.STOP),
        (StopRules(3, eos_token_ids=(EOS,), ignore_eos=True), 1, EOS, 9, None),
        (StopRules(3, eos_token_ids=(EOS,), stop_token_ids=(5,), ignore_eos=True), 1, 5, 9, FinishReason.STOP),
        (StopRules(3), 3, 5, 9, FinishReason.LENGTH),
        (StopRules(9), 3, 5, 0, FinishReason.LENGTH),
        # A stop on the very last allowed token is still a stop.
        (StopRules(3, eos_token_ids=(EOS,)), 3, EOS, 9, FinishReason.STOP),
        # End tokens do not count before min_tokens (they are banned as well, unless a bias forces them).
        (StopRules(9, min_tokens=2, eos_token_ids=(EOS,)), 2, EOS, 9, None),
        (StopRules(9, min_tokens=2, eos_token_ids=(EOS,)), 3, EOS, 9, FinishReason.STOP),
    ],
)
def test_finish_reason_after(
    rules: StopRules, num_output: int, token: int, room: int, expected: FinishReason | None
) -> None:
    assert finish_reason_after(rules, num_output, token, room) is expected
