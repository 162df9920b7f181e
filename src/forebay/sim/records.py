"""What became of every request, in columns: a few dozen bytes each, so that millions fit."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from forebay.core.outcome import EvictReason, FailReason, ShedReason
from forebay.report.records import NEVER, OUTCOMES, OutcomeName, RequestRecord
from forebay.sim.fronts import ENGINE_REFUSED, UNREACHABLE
from forebay.workload.arrival import Arrival

NS_PER_MS = 1_000_000
OPEN = -1
"""Outcome of a request that has not ended."""

REASONS: tuple[str, ...] = (
    "",
    *dict.fromkeys(reason.value for kind in (ShedReason, EvictReason, FailReason) for reason in kind),
    ENGINE_REFUSED,
    UNREACHABLE,
)
_REASON_CODE = {reason: code for code, reason in enumerate(REASONS)}
_OUTCOME_CODE = {outcome: code for code, outcome in enumerate(OUTCOMES)}
COMPLETED, SHED, EVICTED, CANCELLED, FAILED = range(len(OUTCOMES))


class Columns:
    """One row per offered request, all its attempts together, in the order of arrival. Times in ns; NEVER (-1): not.

    `outcome` and `reason` are codes (report.records.OUTCOMES, REASONS); `key` is an index into `keys`, `phase` one into
    `phases`; `output_tokens` counts what was made for it, also of answers that nobody waited for.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.phases: list[str] = []
        self.intended_ns = array("q")
        self.first_token_ns = array("q")
        self.done_ns = array("q")
        self.queue_wait_ns = array("q")
        self.prompt_tokens = array("i")
        self.asked_tokens = array("i")  # output tokens that a whole answer has
        self.output_tokens = array("i")
        self.key = array("i")
        self.phase = array("h")
        self.status = array("h")
        self.attempts = array("h")
        self.outcome = array("b")
        self.reason = array("b")
        self._key_index: dict[str, int] = {}
        self._phase_index: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.intended_ns)

    def add(self, arrival: Arrival, key: str) -> int:
        """A row for a request that arrives. Returns its number."""
        row = len(self.intended_ns)
        self.intended_ns.append(arrival.at_ns)
        self.first_token_ns.append(NEVER)
        self.done_ns.append(NEVER)
        self.queue_wait_ns.append(NEVER)
        self.prompt_tokens.append(arrival.prompt_tokens or 0)
        self.asked_tokens.append(arrival.output_tokens or 0)
        self.output_tokens.append(0)
        self.key.append(_index(self._key_index, self.keys, key))
        self.phase.append(_index(self._phase_index, self.phases, arrival.phase))
        self.status.append(0)
        self.attempts.append(0)
        self.outcome.append(OPEN)
        self.reason.append(0)
        return row

    def end(self, row: int, outcome: OutcomeName, reason: str, now: int) -> None:
        """The request has its outcome."""
        assert self.outcome[row] == OPEN, f"request {row} was given two outcomes"
        self.outcome[row] = _OUTCOME_CODE[outcome]
        self.reason[row] = _REASON_CODE[reason]
        self.done_ns[row] = now

    def records(self) -> Iterator[RequestRecord]:
        """The rows as the records that a measured run writes."""
        for row in range(len(self)):
            outcome, wait = OUTCOMES[self.outcome[row]], self.queue_wait_ns[row]
            reason = REASONS[self.reason[row]]
            failed = outcome == "failed"
            yield RequestRecord(
                index=row,
                phase=self.phases[self.phase[row]],
                key=self.keys[self.key[row]],
                outcome=outcome,
                intended_ns=self.intended_ns[row],
                sent_ns=self.intended_ns[row],
                first_token_ns=self.first_token_ns[row],
                done_ns=self.done_ns[row],
                status=self.status[row],
                attempts=self.attempts[row],
                reason="" if failed else reason,
                error=reason if failed else "",
                prompt_tokens=self.prompt_tokens[row],
                output_tokens=self.output_tokens[row],
                queue_wait_ms=None if wait == NEVER else wait / NS_PER_MS,
            )


def _index(known: dict[str, int], names: list[str], name: str) -> int:
    index = known.get(name)
    if index is None:
        index = known[name] = len(names)
        names.append(name)
    return index
