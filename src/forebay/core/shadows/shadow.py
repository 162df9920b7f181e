"""What a setting in shadow is: asked beside the acting one, told the same, and followed by nobody.

There is one for each question that settings of a pool answer about a request. Each is asked at the moment at which the
acting setting decides, in the state that the acting settings made, and changes nothing but itself: what it would have
to draw by chance it draws from a stream of its own. What it keeps is its `state`, which acts once it is promoted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.admission.retry_after import RetryConfig
from forebay.core.admission.retry_budget import RetryBudgetConfig
from forebay.core.admission.waiting_room import WaitingRoomConfig
from forebay.core.dispatch.balance import BalanceConfig
from forebay.core.instant import Instant
from forebay.core.model import Demand, Mode, Refusal, Request, Ticket, Usage
from forebay.core.outcome import ShedReason
from forebay.core.queueing.ordering import OrderConfig

Policy = Literal[
    "window", "depth", "wait_budget", "fair_share", "hold_back", "waiting_room", "retry_budget", "retry_after",
    "balance", "order",
]  # fmt: skip
Verdict = Literal["same", "stricter", "looser", "other", "sooner", "later"]
"""Beside the acting setting, for one request. Stricter: it would have kept it out, made it wait, or promised it no
place; looser: the other way round. Other: another engine or another request. Sooner, later: told to come back then."""

POLICIES: tuple[Policy, ...] = (
    "window", "depth", "wait_budget", "fair_share", "hold_back", "waiting_room", "retry_budget", "retry_after",
    "balance", "order",
)  # fmt: skip
VERDICTS: tuple[Verdict, ...] = ("same", "stricter", "looser", "other", "sooner", "later")

Moment = Literal["offer", "turn", "return"]
"""A request is decided; one that waited gets an engine; one that was refused is told when to come back."""


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """Other settings for a pool, by the names that they have there. None: that setting has no shadow.

    Those of limits and of the depth's tuner are with these (`limit_shadow`, `tuning.shadow`).
    """

    forecast: ForecastConfig | None = None
    fair: FairShareConfig | None = None
    retry: RetryConfig | None = None
    retry_budget: RetryBudgetConfig | None = None
    waiting_room: WaitingRoomConfig | None = None
    balance: BalanceConfig | None = None
    order: OrderConfig | None = None
    floors: tuple[tuple[int, float], ...] | None = None
    hold_backs: tuple[tuple[str, float], ...] = ()  # (class, share of the places that it leaves to those above)


class Said(NamedTuple):
    """What one shadow said of one request."""

    policy: Policy
    verdict: Verdict
    limit: float  # what it would have allowed
    actual: float  # what it held against that
    unit: str
    choice: str = ""  # what it would have chosen, where it chooses


class Case(NamedTuple):
    """One decision of the acting settings, and what it was about."""

    request: Request
    demand: Demand
    mode: Mode  # in force for it; one that was promised a place is held
    verdict: Any  # the Refusal, the Engine that takes it, or the Outlook of one that waits
    now: Instant
    moment: Moment = "offer"
    ticket: Ticket | None = None  # at its turn
    gives_way: bool = False  # a return that waits for what new requests leave: neither depth nor wait is its question


class Kept(NamedTuple):
    """What a setting has learned, acting or in shadow."""

    config: Any
    state: Any


class Shadow(ABC):
    """One setting in shadow: its question, and what it has to be told for that."""

    policy: ClassVar[Policy]
    setting: ClassVar[str] = ""
    """Its field in `ShadowConfig`, where it keeps a state that may act later."""
    moments: ClassVar[tuple[Moment, ...]] = ("offer",)
    concerns: ClassVar[frozenset[ShedReason]] = frozenset()
    """Refusals of an offer after which the question still stands: by what it is beside, or by what is asked later."""
    prefix_bytes: int = 0
    """Of a body, whose hash it wants to know of every request."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    @abstractmethod
    def judge(self, case: Case) -> Said | None:
        """Its verdict; None when the setting does not concern the request."""

    # What a shadow need not be told, it leaves as it is.

    def admitted(self, ticket: Ticket, engine: Any, now: Instant) -> None:  # noqa: B027
        """A request was let in: for this engine at once, or (None) to wait."""

    def waited(self, ticket: Ticket, now: Instant, *, expired: bool) -> None:  # noqa: B027
        """One that waited has its turn, or its time is up."""

    def ended(self, ticket: Ticket, usage: Usage | None, now: Instant) -> None:  # noqa: B027
        """An admitted request has its outcome, having used this."""

    def removed(self) -> None:  # noqa: B027
        """It is no longer wanted."""


class Shadows:
    """Those of one pool, and the counts of what they said."""

    def __init__(self, shadows: Iterable[Shadow], counts: dict[tuple[Policy, Verdict], int], wanted: Any) -> None:
        """`wanted`: the settings that ask for them."""
        self.wanted = wanted
        self.shadows = tuple(shadows)
        self.counts = counts
        self.prefix_bytes = max((one.prefix_bytes for one in self.shadows), default=0)
        self.offered = tuple(one for one in self.shadows if "offer" in one.moments)
        self.turned = tuple(one for one in self.shadows if "turn" in one.moments)
        self.returned = tuple(one for one in self.shadows if "return" in one.moments)
        self.admitted = tuple(one for one in self.shadows if type(one).admitted is not Shadow.admitted)
        self.waited = tuple(one for one in self.shadows if type(one).waited is not Shadow.waited)
        self.ended = tuple(one for one in self.shadows if type(one).ended is not Shadow.ended)

    def ask(self, shadows: tuple[Shadow, ...], case: Case) -> None:
        """Ask those whose moment it is, count what they say, and leave it with the request."""
        verdict, counts = case.verdict, self.counts
        reason = verdict.reason if case.moment == "offer" and isinstance(verdict, Refusal) else None
        found: tuple[Said, ...] = ()
        for shadow in shadows:
            if reason is None or reason in shadow.concerns:
                said = shadow.judge(case)
                if said is not None:
                    found += (said,)
                    counted = said[:2]
                    counts[counted] = counts.get(counted, 0) + 1
        if found:
            case.request.shadow += found

    def kept(self) -> dict[str, Kept]:
        """What they have learned, by setting."""
        return {one.setting: one.kept for one in self.shadows if one.setting}


def compared(policy: Policy, refuses: bool, would_refuse: bool, limit: float, actual: float, unit: str) -> Said:
    """The verdict of a shadow that lets in or keeps out, as the acting setting does."""
    verdict: Verdict = "same" if refuses == would_refuse else "stricter" if would_refuse else "looser"
    return Said(policy, verdict, limit, actual, unit)
