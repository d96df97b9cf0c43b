"""Request records with given token times."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.load.records import Point, RequestRecord, RunRecord, Status


def record(
    token_s: Sequence[float],
    *,
    scheduled_s: float = 0.0,
    status: Status = "ok",
    output_tokens: int | None = None,
    counted: bool = True,
    stream: str = "chat",
    run: str = "1",
    index: int = 0,
    end_s: float | None = None,
) -> RequestRecord:
    return RequestRecord(
        run=run,
        stream=stream,
        index=index,
        turn=0,
        scheduled_s=scheduled_s,
        counted=counted,
        planned_prompt_tokens=8,
        planned_output_tokens=len(token_s),
        sent_s=scheduled_s,
        token_s=list(token_s),
        end_s=end_s if end_s is not None else (token_s[-1] if token_s else scheduled_s),
        status=status,
        output_tokens=output_tokens,
    )


def run_record(**changes: object) -> RunRecord:
    values: dict[str, object] = {
        "id": "1",
        "part": "p",
        "topology": "t",
        "point": Point(1.0),
        "repeat": 0,
        "entropy": [1],
        "started": "2026-01-01T00:00:00+00:00",
        "warmup_s": 0.0,
        "duration_s": 10.0,
    }
    return RunRecord(**(values | changes))  # type: ignore[arg-type]
