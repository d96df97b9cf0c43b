"""Which operation of a transport shall fail, and how: rules, their text form, and when they strike.

action:operation[:key=value]…      drop:send:header=handoff-ack:nth=1
                                   corrupt:put:p=0.05:for=10
                                   delay:recv:link=control:seconds=2

action      drop | delay | duplicate | reorder | corrupt | cut
operation   send | recv (a message) | put (bulk bytes)
link        a name that whoever wraps a transport gives it; default handoff
header      only messages whose header contains this text
nth         only the n-th matching operation, from 1
count       at most so many times
p           with this probability (0..1), drawn from a generator seeded by `seed` and the rule's text
after, for  from so many seconds on, for so many seconds, counted from when the rule was read
seconds     delay: how long; reorder: how long a message waits for one to overtake it
share       drop of a put: the share of its bytes that is lost, from the end (1: all)
"""

from __future__ import annotations

import enum
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)


class FaultAction(enum.Enum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    CUT = "cut"


class Operation(enum.Enum):
    SEND = "send"
    RECV = "recv"
    PUT = "put"


@dataclass(frozen=True, slots=True)
class FaultRule:
    """See the module's table; times in seconds."""

    text: str
    action: FaultAction
    operation: Operation
    link: str = "handoff"
    header: bytes = b""
    nth: int | None = None
    count: int | None = None
    p: float = 1.0
    after: float = 0.0
    duration: float = math.inf
    seconds: float = 0.2
    share: float = 1.0
    seed: int = 0


def parse_rule(text: str) -> FaultRule:
    """
    Raises:
        ValueError: says which part of the text does not fit.
    """
    action, _, rest = text.partition(":")
    operation, *options = rest.split(":")
    fields: dict[str, object] = {
        "action": _member(FaultAction, action, "action", text),
        "operation": _member(Operation, operation, "operation", text),
    }
    for option in options:
        key, separator, value = option.partition("=")
        if key not in _OPTIONS or not separator:
            raise ValueError(f"{text!r}: {option!r} is not one of {', '.join(_OPTIONS)}, as key=value")
        name, convert, fits, what = _OPTIONS[key]
        is_second = name in fields
        try:
            fields[name] = convert(value)
        except ValueError:
            raise ValueError(f"{text!r}: {key} must be {what}, not {value!r}") from None
        if is_second or not fits(fields[name]):
            raise ValueError(f"{text!r}: {key} must be {what}, once, not {value!r}")
    if operation == "put" and fields.get("header"):
        raise ValueError(f"{text!r}: header: a put has none")
    return FaultRule(text, **fields)  # type: ignore[arg-type]


class FaultPlan:
    """The rules of one process and what they have counted; asked before each operation.

    Args:
        clock: monotonic seconds.
        path: a file with one more rule a line, read again whenever it changes (so that a test can arm a fault in a running
            process); those of its rules that were in force end. It need not exist.
    """

    def __init__(self, rules: Sequence[FaultRule], clock: Callable[[], float], path: Path | None = None) -> None:
        self._clock = clock
        self._path = path
        self._fixed = [_Armed(rule, clock()) for rule in rules]
        self._from_file: list[_Armed] = []
        self._seen: tuple[int, int] | None = None  # inode and mtime of the file as it was read last

    def strike(self, link: str, operation: Operation, header: bytes = b"") -> FaultRule | None:
        """The rule that strikes this operation: the first, of several. All of them have counted it."""
        self._read_again()
        now = self._clock()
        struck = [armed.rule for armed in (*self._fixed, *self._from_file) if armed.strikes(link, operation, header, now)]
        if not struck:
            return None
        log.warning("fault: %s", struck[0].text)
        return struck[0]

    def _read_again(self) -> None:
        if self._path is None:
            return
        try:
            found = self._path.stat()
            if (found.st_ino, found.st_mtime_ns) == self._seen:
                return
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except OSError:
            self._seen, self._from_file = None, []
            return
        self._seen = (found.st_ino, found.st_mtime_ns)
        try:
            rules = [parse_rule(line.strip()) for line in lines if line.strip()]
        except ValueError:
            log.exception("%s: its former rules stay in force", self._path)
            return
        log.warning("faults of %s: %s", self._path, ", ".join(rule.text for rule in rules) or "none")
        self._from_file = [_Armed(rule, self._clock()) for rule in rules]


class _Armed:
    def __init__(self, rule: FaultRule, now: float) -> None:
        self.rule = rule
        self._from = now + rule.after
        self._until = self._from + rule.duration
        self._matched = 0
        self._struck = 0
        self._rng = random.Random(f"{rule.seed} {rule.text}")  # noqa: S311 - repeatable, protects nothing

    def strikes(self, link: str, operation: Operation, header: bytes, now: float) -> bool:
        rule = self.rule
        if link != rule.link or operation is not rule.operation or rule.header not in header:
            return False
        if not self._from <= now < self._until:
            return False
        self._matched += 1
        if rule.nth is not None and self._matched != rule.nth:
            return False
        if rule.count is not None and self._struck >= rule.count:
            return False
        if rule.p < 1.0 and self._rng.random() >= rule.p:
            return False
        self._struck += 1
        return True


def _member(kind: type[enum.Enum], value: str, what: str, text: str) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{text!r}: {what} {value!r} is not one of {', '.join(one.value for one in kind)}") from None


def _is_time(value: object) -> bool:
    return isinstance(value, float) and 0.0 <= value < math.inf


def _is_share(value: object) -> bool:
    return isinstance(value, float) and 0.0 <= value <= 1.0


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and value > 0


_Option = tuple[str, Callable[[str], object], Callable[[object], bool], str]
_OPTIONS: dict[str, _Option] = {
    "link": ("link", str, bool, "a name"),
    "header": ("header", str.encode, bool, "text"),
    "nth": ("nth", int, _is_positive, "a positive whole number"),
    "count": ("count", int, _is_positive, "a positive whole number"),
    "p": ("p", float, _is_share, "a number from 0 to 1"),
    "after": ("after", float, _is_time, "a number of seconds"),
    "for": ("duration", float, _is_time, "a number of seconds"),
    "seconds": ("seconds", float, _is_time, "a number of seconds"),
    "share": ("share", float, _is_share, "a number from 0 to 1"),
    "seed": ("seed", int, lambda value: True, "a whole number"),
}
