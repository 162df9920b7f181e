"""Stop strings across token borders."""

from __future__ import annotations

from random import Random

import pytest

from forebay.engines.serving import StopMatcher


def shown(stops: tuple[str, ...], tokens: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = ""
    for token in tokens:
        part, stopped = matcher.feed(token)
        text += part
        if stopped:
            return text, True
    return text + matcher.flush(), False


@pytest.mark.parametrize(
    ("stops", "tokens", "expected"),
    [
        ((), ["a", "b"], ("ab", False)),
        (("END",), ["x E", "N", "D y"], ("x ", True)),
        (("END",), ["x E", "N"], ("x EN", False)),
        (("aab",), ["a", "a", "a", "b"], ("a", True)),
        (("long stop", "st"), ["a long ", "stop"], ("a ", True)),
        (("\n",), ["one\ntwo"], ("one", True)),
    ],
)
def test_text_is_shown_up_to_the_stop(stops: tuple[str, ...], tokens: list[str], expected: tuple[str, bool]) -> None:
    assert shown(stops, tokens) == expected


def test_any_split_into_tokens_shows_the_same() -> None:
    rng = Random(3)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(12))
        stop = "".join(rng.choice("ab") for _ in range(rng.randint(1, 4)))
        cuts = sorted(rng.sample(range(13), 4))
        tokens = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
        at = text.find(stop)
        assert shown((stop,), tokens) == ((text, False) if at < 0 else (text[:at], True))
