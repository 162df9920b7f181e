"""Prepaid tokens of one key, as far as they are leased to this gateway.

Every leased token is in one place: leased = held + spent + left. A request holds what it reserves, and captures at its
end what it used. What it used beyond all that is left (one chunk of a stream, or a prompt that was longer than
estimated) is owed: never spent here, and paid first by the next lease, or by the account itself when it hears of it.
"""

from __future__ import annotations


class CreditLine:
    """Whole tokens; `spent` never exceeds `leased`."""

    __slots__ = ("beyond", "held", "last", "leased", "owed", "spent")

    def __init__(self) -> None:
        self.leased = 0  # less what was given back
        self.held = 0
        self.spent = 0
        self.owed = 0
        self.beyond = 0  # tokens that were owed at some time, and that the account has not said to have paid
        self.last = False  # there is no more where the last lease came from

    @property
    def left(self) -> int:
        """Tokens that may still be held, never negative."""
        left = self.leased - self.held - self.spent
        return left if left > 0 else 0

    def lease(self, tokens: int, *, last: bool = False) -> None:
        """Take more; `last`: the account has nothing beyond it."""
        assert tokens >= 0, "credits: a lease takes nothing away"
        self.leased += tokens
        self.last = last
        self._pay()

    def hold(self, tokens: int) -> None:
        """Set aside what a request may use."""
        self.held += tokens

    def capture(self, held: int, used: int) -> None:
        """End a hold: `used` is spent, and the rest of the hold is free again."""
        self.held -= held
        assert self.held >= 0, "credits: more was released than held"
        owed = self.owed
        self.owed += used
        self._pay()
        if self.owed > owed:
            self.beyond += self.owed - owed

    def cover(self, tokens: int) -> None:
        """The account paid so much that went beyond the leases, or owes it: as if so much more had been leased. Never
        more than was owed here."""
        covered = min(tokens, self.beyond)
        self.beyond -= covered
        self.leased += covered
        self._pay()

    def _pay(self) -> None:
        paid = min(self.owed, self.left)
        self.spent += paid
        self.owed -= paid

    def give_back(self) -> int:
        """Take out all that is neither held nor spent. Returns how much that was."""
        left = self.left
        self.leased -= left
        return left
