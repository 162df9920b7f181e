"""The section of the admission room."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from forebay.config.fields import Milliseconds, Seconds, Section
from forebay.config.secret import Secret
from forebay.config.shadow import AdmissionShadow, Retry
from forebay.core.model import Mode
from forebay.core.quota.terms import OverBudget


class Admission(Section, frozen=True):
    """Whether a request that cannot start at once is held, refused, or may wait a little."""

    mode: Annotated[
        Mode,
        Meta(
            description="backpressure holds it; admission refuses it; hybrid lets it wait within the wait budget. "
            "A key's own mode goes before its class's, that before its route's, and that before this."
        ),
    ] = Mode.HYBRID
    wait_budget_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="Largest predicted wait at which a request is still admitted, in ms. Unset: 10 % of "
            "slo.ttft_ms, at most 50. It is raised while it is shorter than the time of a few engine slots.",
            examples=[50],
        ),
    ] = None
    late_share: Annotated[
        Annotated[float, Meta(gt=0, le=0.5)],
        Meta(
            description="Share of those that met a queue that may wait longer than the budget: what is predicted is "
            "corrected towards that."
        ),
    ] = 0.01
    tail_z: Annotated[
        Annotated[float, Meta(ge=0, le=5)],
        Meta(
            description="Allowance for uneven releases in the predicted wait, in standard deviations of a Poisson "
            "count."
        ),
    ] = 1.28
    floor_slots: Annotated[
        Annotated[float, Meta(ge=0, le=1000)],
        Meta(description="The wait budget is never below the time of so many slot releases, up to slo.ttft_ms."),
    ] = 3.0
    fair_share: Annotated[
        bool,
        Meta(
            description="Refuse a key that is ahead of its fair share of the completed work while others want theirs "
            "(429 key_share). A key that is alone is never refused for it; nor is anything in backpressure mode."
        ),
    ] = True
    waiting_room: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests that may wait, in any mode, while no engine is up and one is warming: for cold "
            "starts and scale to zero. Others are told when to come. 0: nobody waits.",
            examples=[1000],
        ),
    ] = 0
    waiting_room_s: Annotated[
        Seconds,
        Meta(description="Longest that a request waits there, and the longest warm-up that is waited for, in s."),
    ] = 60
    retry_budget: Annotated[
        bool,
        Meta(
            description="While a pool is overloaded, refuse retries (by x-stainless-retry-count, or by an "
            "idempotency-key seen before) that come at another time than they were told, beyond a tenth of the key's "
            "refused first attempts and one per second."
        ),
    ] = True
    retry_tickets: Annotated[
        bool,
        Meta(
            description="Send a retry ticket (x-forebay-ticket) with every refusal that promises a place, and let the "
            "retry that sends it back in time have that place: it spends no retry budget, is not refused for its key's "
            "share or the predicted wait, and goes before new requests of its priority."
        ),
    ] = False
    retry_ticket_secret: Annotated[
        Secret | None,
        Meta(
            description="What retry tickets are signed with, 32 characters or more, the same for gateways that shall "
            "take each other's; may be env:NAME or file:PATH. A reload changes it, and tickets signed with the one "
            "before count until they end. Unset: a random one, of this process alone.",
            examples=["env:FOREBAY_RETRY_TICKET_SECRET"],
        ),
    ] = None
    retry: Retry = Retry()
    over_budget: Annotated[
        OverBudget,
        Meta(
            description="What becomes of a stream that generates more than its key can pay. debt: it goes on, and the "
            "key pays before its next request; stop: it ends with an error event; slow: it goes on as the key refills."
        ),
    ] = OverBudget.DEBT
    preset: Annotated[
        Literal["internal", "public-api", "b2b", "offline", "realtime"] | None,
        Meta(
            description="Defaults for a kind of use, beneath everything that is set explicitly.",
            examples=["realtime"],
        ),
    ] = None
    shadow: AdmissionShadow = AdmissionShadow()
