"""What a run looks like while it goes on: one line on a terminal, renewed a few times a second; nothing elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from benchmarks.load.records import RequestRecord

KEPT_SAMPLES = 2000
REFRESH_HZ = 4.0


class LiveDisplay:
    """Latencies of the last requests and tokens. Use as a context manager around a run."""

    def __init__(self, console: Console, title: str, duration_s: float) -> None:
        self._title = title
        self._duration_s = duration_s
        self._clock: Callable[[], float] = lambda: 0.0
        self._ttft: deque[float] = deque(maxlen=KEPT_SAMPLES)
        self._itl: deque[float] = deque(maxlen=KEPT_SAMPLES)
        self._tokens = self._done = self._failed = 0
        self._live = (
            Live(console=console, refresh_per_second=REFRESH_HZ, transient=True, get_renderable=self._render)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_start(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def on_token(self, record: RequestRecord) -> None:
        self._tokens += 1
        times = record.token_s
        if len(times) == 1:
            self._ttft.append(times[0] - record.scheduled_s)
        else:
            self._itl.append(times[-1] - times[-2])

    def on_end(self, record: RequestRecord) -> None:
        if record.status == "ok":
            self._done += 1
        elif record.status != "cancelled":
            self._failed += 1

    def _render(self) -> Text:
        now = max(0.0, self._clock())
        failed = f"  failed {self._failed}" if self._failed else ""
        return Text(
            f"{self._title}  {now:.0f}/{self._duration_s:.0f} s  done {self._done}{failed}  tokens {self._tokens}  "
            f"TTFT {_p50_p99(self._ttft)}  ITL {_p50_p99(self._itl)}"
        )


def _p50_p99(seconds: deque[float]) -> str:
    if not seconds:
        return "–"
    p50, p99 = np.percentile(np.asarray(seconds), (50, 99)) * 1e3
    return f"p50 {p50:.0f} p99 {p99:.0f} ms"
