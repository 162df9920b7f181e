"""How full an engine's memory will become of what it holds."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.core.model import Lease


def peak_tokens(leases: Iterable[Lease]) -> int:
    """Most tokens that these leases will have in the engine's memory at one time, were no other to join.

    With the leases by what they still have to write, the longest first, the memory is fullest just as one of them
    ends: all that are longer hold what they have now and as much again as that one had left.
    """
    rest = []
    for lease in leases:
        demand = lease.ticket.demand
        # A stream that outlived its estimate is expected to go on for a while: lengths have heavy tails.
        left = max(demand.output_tokens - lease.generated, lease.generated // 4, 1)
        rest.append((left, demand.input_tokens + lease.generated))
    rest.sort(reverse=True)
    peak = held = 0
    for number, (left, now_tokens) in enumerate(rest, start=1):
        held += now_tokens
        if held + number * left > peak:
            peak = held + number * left
    return peak
