from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.stop_strings import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops, include)
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched:
            return shown, True
    shown.append(matcher.flush())
    return shown, False


def oracle(stops: tuple[str, ...], text: str, include: bool) -> tuple[str, bool]:
    """Slow: after each character, is some stop string complete?"""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return (text[:end] if include else text[: end - max(map(len, ending))]), True
    return text, False


@given(
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=0, max_size=4),
    pieces=st.lists(st.text("ab ", max_size=5), max_size=12),
    include=st.booleans(),
)
def test_B1_what_matches_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str], include: bool) -> None:
    shown, matched = run(tuple(stops), pieces, include)
    assert ("".join(shown), matched) == oracle(tuple(stops), "".join(pieces), include)


@given(st.lists(st.text("abZ", max_size=4), max_size=12))
def test_B5_only_a_possible_beginning_of_a_stop_is_held(pieces: list[str]) -> None:
    stop = "ZZZZZZZZZZZZ"
    matcher = StopMatcher((stop,), include_stop=False)
    shown = fed = ""
    for piece in pieces:
        fed += piece
        text, matched = matcher.push(piece)
        if matched:
            return
        shown += text
        held = fed[len(shown) :]
        assert stop.startswith(held)
        assert shown + held == fed
        trailing = len(fed) - len(fed.rstrip("Z"))
        assert len(held) == min(trailing, len(stop) - 1)


def test_include_stop_shows_the_stop_and_nothing_behind_it() -> None:
    shown, matched = run((" a a",), ["x", " a", " a b"], include=True)
    assert ("".join(shown), matched) == ("x a a", True)


def test_of_stops_that_end_together_the_longest_is_cut() -> None:
    shown, matched = run(("c", "abc"), ["xa", "b", "c"])
    assert ("".join(shown), matched) == ("x", True)
