"""Naive: a budget of tokens per second that is spent and never refilled."""

BYTES_PER_TOKEN = 4
ANSWER_TOKENS = 128


class TokenBudget:
    """Admits requests while this second's tokens last. (There is no next second.)"""

    def __init__(self, tokens_per_second: int) -> None:
        self.left = tokens_per_second

    def admit(self, prompt: str) -> int:
        """The status to answer with: 200, or 429 when the budget does not cover the request."""
        cost = max(1, len(prompt) // BYTES_PER_TOKEN) + ANSWER_TOKENS
        if cost > self.left:
            return 429
        self.left -= cost
        return 200
