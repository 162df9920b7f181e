"""The last decisions, kept so that a caller's question about one request can be answered with its figures.

What is kept of each is a tuple of references, made when the request has its end; it is put into words only when
somebody asks. No prompt, no secret, and no reference to the request's connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from forebay.core.instant import MILLISECOND, Instant
from forebay.core.model import Demand, Refusal, Request, Ticket, Usage
from forebay.core.outcome import Outcome
from forebay.core.pool import Pool
from forebay.core.quota.path import Path
from forebay.core.shadows.shadow import Said
from forebay.telemetry.figures import in_words, taken

COMPLETED = Outcome.COMPLETED  # looking it up on its class costs more than comparing


class Recent:
    """The last `kept` requests that the pipeline decided, as an observer of it."""

    def __init__(
        self,
        kept: int,
        *,
        completed: bool,
        identify: Callable[[Request], bytes],
        estimate: Callable[[Request], Demand],
        pool_of: Callable[[Request], Pool | None],
        path_of: Callable[[Request], Path],
        clock: Callable[[], int],
    ) -> None:
        """`completed`: keep those that were answered too. `identify` gives a request's id, `estimate` the demand of one
        that was refused, `pool_of` the pool that it would have gone to, `path_of` the limits that it met, `clock` the
        present instant."""
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=kept)
        self._completed = completed
        self._identify = identify
        self._estimate = estimate
        self._pool_of = pool_of
        self._path_of = path_of
        self._clock = clock

    def admitted(self, ticket: Ticket, now: Instant) -> None:
        """It was let in, and nothing else has happened yet: take the figures behind that."""
        ticket.figures = taken(ticket.pool, ticket.request, ticket.demand, ticket.path, now, engines=True)

    def closed(self, ticket: Ticket) -> None:
        """A ticket has its outcome."""
        if ticket.outcome is COMPLETED and not self._completed:
            return
        request, lease = ticket.request, ticket.lease
        engine = None if lease is None else lease.engine.name
        self._kept.append((
            self._identify(request), request.key, request.model, request.route, request.priority_class,
            request.priority, ticket.mode, ticket.outcome, ticket.reason, ticket.demand, ticket.usage, ticket.arrived,
            ticket.dispatched, ticket.first_token, ticket.closed, ticket.predicted_wait_ns, ticket.wait_budget_ns,
            ticket.met_queue, engine, request.shadow, request.holds_place, ticket.refusal, ticket.figures,
        ))  # fmt: skip

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """A request was refused before it was queued."""
        pool, demand, now = self._pool_of(request), self._estimate(request), self._clock()
        figures = None
        if pool is not None:
            figures = taken(pool, request, demand, self._path_of(request), now, engines=False)
        self._kept.append((
            self._identify(request), request.key, request.model, request.route, request.priority_class,
            request.priority, request.mode or (pool.mode if pool is not None else None), refusal, demand, now,
            predicted_wait_ns, figures, request.shadow,
        ))  # fmt: skip

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Every figure behind the last decision on this request, in milliseconds and tokens; None if it is not kept."""
        wanted = request_id.encode()
        for entry in reversed(self._kept):
            if entry[0] == wanted:
                return _refused(entry) if len(entry) == 13 else _ended(entry)
        return None


def _who(entry: tuple[Any, ...]) -> dict[str, Any]:
    request_id, key, model, route, priority_class, priority, mode = entry[:7]
    return {
        "request_id": request_id.decode("latin-1"), "key": key, "model": model, "route": route,
        "class": priority_class, "priority": priority, "mode": None if mode is None else mode.value,
    }  # fmt: skip


def _refused(entry: tuple[Any, ...]) -> dict[str, Any]:
    refusal, demand, at, predicted_ns, figures, shadow = entry[7:]
    return _who(entry) | {
        "outcome": Outcome.SHED.value,
        "reason": refusal.reason.value,
        "decided_at_ms": at // MILLISECOND,
        **_told(refusal),
        "predicted_wait_ms": predicted_ns / MILLISECOND,
        "estimate": _demand(demand),
        **({"pool": None} if figures is None else in_words(figures)),
        "shadow": _shadow(shadow),
    }


def _told(refusal: Refusal) -> dict[str, Any]:
    """What the limit was, and when to come back."""
    retry = refusal.retry_after_ns
    return {
        "limit": refusal.limit,
        "actual": refusal.actual,
        "unit": refusal.unit,
        "level": refusal.level,
        "retry_after_ms": None if retry is None else retry / MILLISECOND,
        "should_retry": retry is not None and refusal.obeyed,
        "reserved_place": refusal.reserved,
    }


def _ended(entry: tuple[Any, ...]) -> dict[str, Any]:
    outcome, reason, demand, usage, arrived, dispatched, first, closed = entry[7:15]
    predicted_ns, budget_ns, met, engine, shadow, held_place, refusal, figures = entry[15:]
    return _who(entry) | {
        "outcome": outcome.value,
        "reason": None if reason is None else reason.value,
        "decided_at_ms": arrived // MILLISECOND,
        "engine": engine,
        "met_queue": met,
        "held_place": held_place,
        "predicted_wait_ms": predicted_ns / MILLISECOND,
        "wait_budget_ms": budget_ns / MILLISECOND,
        "queue_wait_ms": ((dispatched or closed) - arrived) / MILLISECOND,
        "first_token_ms": (first - arrived) / MILLISECOND if first else None,
        "total_ms": (closed - arrived) / MILLISECOND,
        "estimate": _demand(demand),
        "usage": _usage(usage),
        **({} if refusal is None else _told(refusal)),
        **({} if figures is None else in_words(figures)),
        "shadow": _shadow(shadow),
    }


def _shadow(said: tuple[Said, ...]) -> dict[str, Any]:
    """What settings in shadow would have said when it came."""
    return {
        one.policy: {"verdict": one.verdict, "limit": one.limit, "actual": one.actual, "unit": one.unit}
        | ({"choice": one.choice} if one.choice else {})
        for one in said
    }


def _demand(demand: Demand) -> dict[str, Any]:
    return {
        "input_tokens": demand.input_tokens, "output_tokens": demand.output_tokens,
        "output_reserved": demand.output_reserved, "output_guessed": demand.output_guessed,
    }  # fmt: skip


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens, "exact": usage.exact}
