from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from service_kit.logging import LogFormat, configure_logging


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(log_format: LogFormat) -> str:
    stream = io.StringIO()
    configure_logging(log_format, "info", "decode-0", stream)
    logger = logging.getLogger("engine.core")
    logger.debug("not shown")
    logger.info("step %d\ndone", 3, extra={"request_id": "r1", "blocks": {1}})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    return stream.getvalue()


@pytest.mark.parametrize("log_format", ["json", "auto"])
def test_json_lines_carry_fields_and_exceptions(log_format: LogFormat) -> None:
    first, second = (json.loads(line) for line in logged(log_format).splitlines())
    assert first["message"] == "step 3\ndone"
    assert (first["level"], first["process"], first["logger"]) == ("info", "decode-0", "engine.core")
    assert (first["request_id"], first["blocks"]) == ("r1", [1])
    assert first["time"].endswith("+00:00")
    assert "ValueError: broken" in second["exception"]


def test_human_lines() -> None:
    lines = logged("human").splitlines()
    assert lines[0].endswith("INFO    engine.core: step 3\\ndone  request_id=r1 blocks={1}")
    assert lines[-1] == "ValueError: broken"
