"""One request that is going to be sent."""

from __future__ import annotations

from typing import NamedTuple

NS_PER_S = 1_000_000_000


class Arrival(NamedTuple):
    """One request to be sent: its intended time from the start of the run, and what a trace says about it.

    `prompt_tokens` and `output_tokens` are None where the workload draws them. `key` names the caller and `session` the
    conversation (empty: unknown); `prefix_tokens` of the prompt repeat what an earlier request of the session had.
    """

    at_ns: int
    phase: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    key: str = ""
    session: str = ""
    prefix_tokens: int = 0
