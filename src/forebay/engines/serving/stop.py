"""Stop strings in a stream of token texts: found across token borders, never shown in part."""

from __future__ import annotations


class StopMatcher:
    """Holds back just as much text as might turn out to be the start of a stop string."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes a token's text; returns what may be shown now, and whether a stop string was completed."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        held = self._held
        for size in range(min(len(stop) - 1, len(held)), 0, -1):
            if held.endswith(stop[:size]):
                return size
        return 0
