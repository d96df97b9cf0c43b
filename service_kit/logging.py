"""One line per event: for people on a terminal, as JSON for machines.

Fields beside the message travel as `extra`, the request's id among them:

    logger.info("prefill done", extra={"request_id": spec.request_id, "num_tokens": 512})

`configure_logging` is called once, by a process' main; everything else only asks `logging.getLogger(__name__)`.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

LogFormat = Literal["auto", "human", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def configure_logging(log_format: LogFormat, level: LogLevel, process: str, stream: TextIO | None = None) -> None:
    """Send every logger's lines to `stream` (standard error), replacing what was set up before.

    Args:
        log_format: `auto` is `human` on a terminal and `json` elsewhere.
        process: the name of this process in JSON lines, such as ``prefill-0``.
    """
    stream = sys.stderr if stream is None else stream
    if log_format == "auto":
        log_format = "human" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else HumanFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class HumanFormatter(logging.Formatter):
    """``12:00:01.250 INFO    engine.core: message  request_id=ab num_tokens=512``, a traceback on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).astimezone()
        clock = f"{moment:%H:%M:%S}.{int(record.msecs):03d}"
        fields = " ".join(f"{name}={value}" for name, value in extra_fields(record).items())
        text = record.getMessage().replace("\n", "\\n")
        line = f"{clock} {record.levelname:<7} {record.name}: {text}" + (f"  {fields}" if fields else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()
