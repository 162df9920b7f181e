"""Callers: they send when the workload says so, obey or ignore what they are told, and leave when patience ends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from zlib import crc32

from forebay.config.build import KeyEntry
from forebay.core.admission.retry_budget import EARLY_S, LATE_S
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.model import Refusal, Request
from forebay.report.records import EVICT_REASONS, OutcomeName
from forebay.sim.answers import SHARED_STATUS, STATUS, headers
from forebay.sim.call import Call, Front
from forebay.sim.records import Columns
from forebay.sim.scenario import Scenario
from forebay.sim.world import ARRIVAL, Time
from forebay.workload.arrival import Arrival
from forebay.workload.retry import NoRetry, SdkRetry, client_model

FRAME_BYTES = 160
"""JSON around the text of a chat request."""

LEAST_NOISE = 0.25  # of the mean bytes per token: no text is denser than that


class Callers:
    """All callers of a run. Draw from streams of their own, so that changing one part leaves the others."""

    def __init__(
        self,
        world: Time,
        scenario: Scenario,
        arrivals: Iterator[Arrival],
        keys: dict[str, KeyEntry],
        *,
        generates: bool,
    ) -> None:
        """`keys`: what the configuration says of a key id; the entry `""` is that of all others. `generates`: False
        for engines that make no tokens."""
        clients = scenario.clients
        self.records = Columns()
        self.fronts: list[Front] = []
        """Must be filled before `begin`."""
        self.model = ""
        self.anonymous = ""
        """Key id of requests without a key."""
        self.open = 0
        """Requests that have not ended."""
        self._world = world
        self._arrivals = arrivals
        self._next: Arrival | None = None
        self._keys = keys
        self._generates = generates
        self._clients = clients
        self._by_key = scenario.spread == "by-key"
        self._turn = 0
        self._bytes = Random(f"{scenario.seed}/bytes")
        self._retries = Random(f"{scenario.seed}/retries")
        self._policy = client_model(clients.retry, clients.patience_s)
        self._retrying = not isinstance(self._policy, NoRetry)
        self._shows_tickets = isinstance(self._policy, SdkRetry) and self._policy.shows_tickets
        self._patience_ns = None if clients.patience_s is None else int(clients.patience_s * SECOND)
        self._deadline_ns = None if clients.deadline_ms is None else clients.deadline_ms * MILLISECOND
        self._read_ns: int | None = None  # what an SDK waits for the first byte of an answer
        if isinstance(self._policy, SdkRetry):
            self._read_ns = int(self._policy.read_timeout_s * SECOND)  # SDKs tell it with every attempt
        self._shared_status = SHARED_STATUS

    def begin(self) -> None:
        """Expect the first arrival."""
        self._await_next()

    def map_shared(self, status: int) -> None:
        """Refusals for shared capacity have this status."""
        self._shared_status = status

    # ---- sending ---------------------------------------------------------------------------------------------

    def _await_next(self) -> None:
        self._next = arrival = next(self._arrivals, None)
        if arrival is not None:
            self._world.at(arrival.at_ns, self._arrive, ARRIVAL)

    def _arrive(self) -> None:
        arrival = self._next
        assert arrival is not None
        self._await_next()
        key = arrival.key or self.anonymous
        prompt, output = arrival.prompt_tokens or 1, arrival.output_tokens or 1
        index = self.records.add(arrival, key)
        call = Call(index, key, prompt, output if self._generates else 0, arrival.session, arrival.prefix_tokens)
        clients = self._clients
        noise = self._bytes.gauss(1.0, clients.bytes_noise) if clients.bytes_noise else 1.0
        call.text_bytes = max(1, int(prompt * clients.bytes_per_token * max(LEAST_NOISE, noise)))
        self.open += 1
        if self._patience_ns is not None:
            self._world.at(self._world.now + self._patience_ns, partial(self._leave, call), ARRIVAL)
        self._send(call)

    def _send(self, call: Call) -> None:
        if call.done:
            return  # its caller left while it waited to retry
        call.renew()
        self.records.attempts[call.index] = call.attempts
        fronts = self.fronts
        if self._by_key:
            front = fronts[crc32(call.key.encode()) % len(fronts)]
        else:
            front = fronts[self._turn % len(fronts)]
            self._turn += 1
        call.front = front
        call.request = request = self._request(call)
        front.offer(call, request)

    def _request(self, call: Call) -> Request:
        entry = self._keys.get(call.key) or self._keys[""]
        deadline = None if self._deadline_ns is None else self._world.now + self._deadline_ns
        request = Request(
            call.key,
            self.model,
            owner=call,
            body_bytes=call.text_bytes + FRAME_BYTES,
            text_bytes=call.text_bytes,
            max_output_tokens=self._cap(call),
            generates=self._generates,
            stream=self._clients.stream and self._generates,
            deadline=deadline,
            patience=None if self._read_ns is None else self._world.now + self._read_ns,
        )
        request.priority, request.priority_class, request.mode = entry.priority, entry.priority_class, entry.mode
        request.weight, request.hold_back = entry.weight, entry.hold_back
        if call.session:
            request.prefix = crc32(call.session.encode()) << 32 | 1  # its turns begin alike
        if isinstance(self._policy, SdkRetry):
            request.obeys_ns = int(self._policy.honoured_up_to_s * SECOND)  # its name tells the gateway
            request.retries = call.attempts - 1
            if call.place is not None:
                # A retry ticket: what the data port would find of it, as far as this caller can show one.
                request.holds_place = call.place - EARLY_S * SECOND <= self._world.now <= call.place + LATE_S * SECOND
                call.place = None
        return request

    def _cap(self, call: Call) -> int | None:
        """The cap that the caller sets on its answer."""
        if self._clients.max_tokens == "unset" or not self._generates:
            return None
        if self._clients.max_tokens == "exact":
            return call.output_tokens
        return 1 << (call.output_tokens - 1).bit_length()

    # ---- how attempts end ------------------------------------------------------------------------------------

    def completed(self, call: Call) -> None:
        """The answer is whole."""
        records, row = self.records, call.index
        if call.first_token:
            records.first_token_ns[row] = call.first_token
        if call.ticket is not None:
            records.queue_wait_ns[row] = call.ticket.queue_wait_ns
        records.output_tokens[row] += call.output_tokens
        self._end(call, "completed", "", 200)

    def refused(self, call: Call, refusal: Refusal) -> None:
        """It was shed or evicted; perhaps it comes back."""
        reason = refusal.reason.value
        status = STATUS[reason]
        if status == SHARED_STATUS:
            status = self._shared_status
        if refusal.reserved and refusal.retry_after_ns is not None and self._shows_tickets:
            call.place = self._world.now + refusal.retry_after_ns
        outcome: OutcomeName = "evicted" if reason in EVICT_REASONS else "shed"
        told = headers(refusal.retry_after_ns, refusal.obeyed) if self._retrying else {}
        self._end_or_retry(call, outcome, reason, status, told)

    def broken(self, call: Call, reason: str, made: int) -> None:
        """The engine failed, or refused it."""
        self.records.output_tokens[call.index] += made
        if call.first_token:
            self.records.first_token_ns[call.index] = call.first_token
            self._end(call, "failed", reason, 200)  # a stream that broke off: client libraries raise
        else:
            self._end_or_retry(call, "failed", reason, STATUS[reason], {})

    def _end_or_retry(self, call: Call, outcome: OutcomeName, reason: str, status: int, told: dict[str, str]) -> None:
        if self._retrying:
            now = self._world.now
            delay_s = self._policy.delay_s(call.attempts - 1, status, told, self._retries, now / SECOND)
            if delay_s is not None:
                call.front = None
                self._world.at(now + int(delay_s * SECOND), partial(self._send, call), ARRIVAL)
                return
        self._end(call, outcome, reason, status)

    def _leave(self, call: Call) -> None:
        """Its patience has ended."""
        if call.done:
            return
        if call.front is not None:
            self.records.output_tokens[call.index] += call.front.leave(call)
            if call.first_token:
                self.records.first_token_ns[call.index] = call.first_token
        self._end(call, "cancelled", "", 0)

    def _end(self, call: Call, outcome: OutcomeName, reason: str, status: int) -> None:
        call.done = True
        call.forget()
        self.open -= 1
        self.records.status[call.index] = status
        self.records.end(call.index, outcome, reason, self._world.now)
