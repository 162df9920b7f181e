"""The moments at which the pipeline asks the shadows of a pool, and tells them what happened.

Each question is put at the state in which the request came, which is the work of the acting settings. A request that
none of these questions concerns (over its key's limits, say) is not asked about.
"""

from __future__ import annotations

from forebay.core import returning, verdicts
from forebay.core.admission.forecast import Outlook
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Instant
from forebay.core.model import Demand, Mode, Refusal, Request, Ticket, Usage
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case, Shadows


def admitted(shadows: Shadows, ticket: Ticket, verdict: Engine | Outlook, now: Instant) -> None:
    """The request was admitted, to start at once or to wait."""
    request, mode = ticket.request, ticket.mode
    if isinstance(verdict, Outlook):
        mode = verdict.mode
    elif request.holds_place:
        mode = Mode.BACKPRESSURE
    if shadows.offered:
        shadows.ask(shadows.offered, Case(request, ticket.demand, mode, verdict, now, gives_way=ticket.gives_way))
    engine = verdict if isinstance(verdict, Engine) else None
    for shadow in shadows.admitted:
        shadow.admitted(ticket, engine, now)


def refused(pool: Pool, request: Request, demand: Demand, refusal: Refusal, now: Instant) -> Refusal:
    """It was refused. Returns the refusal with its time to come back."""
    shadows = pool.shadows
    if shadows is not None and shadows.offered:
        holds = request.holds_place and verdicts.holds_place(pool, now)
        mode = Mode.BACKPRESSURE if holds else request.mode or pool.mode
        gives_way = bool(request.retries) and not holds and returning.gives_way(pool, request, mode, now)
        shadows.ask(shadows.offered, Case(request, demand, mode, refusal, now, gives_way=gives_way))
    refusal = verdicts.timed(pool, refusal, request, now)
    if shadows is not None:
        told(shadows, request, demand, refusal, now)
    return refusal


def told(shadows: Shadows, request: Request, demand: Demand, refusal: Refusal, now: Instant) -> None:
    """It was refused or evicted, and told when to come back."""
    if shadows.returned:
        shadows.ask(shadows.returned, Case(request, demand, Mode.HYBRID, refusal, now, "return"))


def turned(shadows: Shadows, ticket: Ticket, engine: Engine, now: Instant, *, led: bool = False) -> None:
    """One that waited has just been taken out of the queue for an engine; `led` there by the first of its batch."""
    if shadows.turned and not led:
        shadows.ask(shadows.turned, Case(ticket.request, ticket.demand, ticket.mode, engine, now, "turn", ticket))
    for shadow in shadows.waited:
        shadow.waited(ticket, now, expired=False)


def expired(shadows: Shadows, ticket: Ticket, now: Instant) -> None:
    """Its time was up while it waited."""
    for shadow in shadows.waited:
        shadow.waited(ticket, now, expired=True)


def ended(shadows: Shadows, ticket: Ticket, usage: Usage | None, now: Instant) -> None:
    """An admitted request has its outcome, having used this."""
    for shadow in shadows.ended:
        shadow.ended(ticket, usage, now)
