"""The prefix cache of a simulated engine: what sessions leave behind, the least recently used going first."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """KV tokens that no running sequence holds, by session. It lives in the room that the others leave.

    One entry per session, used by one sequence at a time: a second one that comes while the first runs finds nothing.
    Prefixes that sessions share, such as a system prompt, are not modelled.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """KV tokens held, over all sessions."""
        self._held: OrderedDict[str, int] = OrderedDict()  # the least recently used first

    def held(self, session: str) -> int:
        """Tokens that the session's next sequence finds."""
        return self._held.get(session, 0)

    def take(self, session: str) -> None:
        """A sequence has been admitted with the session's entry, and holds it from now on."""
        self.tokens -= self._held.pop(session, 0)

    def keep(self, session: str, tokens: int) -> None:
        """A sequence has left so many tokens. Of two entries the larger stays."""
        before = self._held.pop(session, 0)
        kept = max(before, tokens)
        self.tokens += kept - before
        self._held[session] = kept

    def shrink(self, room: int) -> None:
        """Let sessions go, the least recently used first, until the rest takes at most `room` tokens."""
        while self.tokens > room:
            _, tokens = self._held.popitem(last=False)
            self.tokens -= tokens
