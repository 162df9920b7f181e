"""The decision matrix as a table: where to start for each kind of clients, what overrides it, and what to add later.

Read it from the top: `SITUATIONS` has one row for each kind of clients; the first of `OVERRIDES` that applies changes
the mode; `LATER` is what grows out of a beginning. Whether a capability exists is asked of the configuration's schema,
so this table cannot promise what the gateway does not accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from msgspec.structs import fields

from forebay.advise.answers import Answers, Clients
from forebay.config.read import bare, is_section
from forebay.config.schema import LATER as NOT_YET
from forebay.config.schema import Config
from forebay.core.model import Mode

ConfigPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Situation:
    """A row of the matrix."""

    preset: str
    mode: Mode
    why: str
    later: tuple[str, ...]
    """Names in `LATER`, in the order in which they pay."""


SITUATIONS: dict[Clients, Situation] = {
    "internal": Situation(
        "internal",
        Mode.BACKPRESSURE,
        "Both ends are yours and the senders are known: making them wait costs nobody work, and they send no more "
        "than they can have open.",
        ("tokens in flight", "hybrid", "shared limits"),
    ),
    "public": Situation(
        "public-api",
        Mode.ADMISSION,
        "Nobody bounds strangers, and their retries add to an overload: they get a place now, or a refusal with the "
        "time to come back.",
        ("keys", "hybrid", "tokens in flight"),
    ),
    "b2b": Situation(
        "b2b",
        Mode.ADMISSION,
        "Capacity that is sold must be there for the one who bought it: every customer has a key with an allowance, "
        "and what is beyond it is refused whoever else is idle.",
        ("token envelope", "hybrid", "credits", "shared limits"),
    ),
    "offline": Situation(
        "offline",
        Mode.BACKPRESSURE,
        "Nobody waits for the answer and nothing may be lost: requests wait for as long as it takes, and the engine "
        "is always full.",
        (),
    ),
    "realtime": Situation(
        "realtime",
        Mode.HYBRID,
        "A person watches: a wait of some milliseconds fills the places that a burst leaves empty, a long one is worse "
        "than a refusal.",
        ("tokens in flight", "hold back", "tuner"),
    ),
}


@dataclass(frozen=True, slots=True)
class Override:
    """A reason to begin with another mode than the row's."""

    applies: Callable[[Answers], bool]
    mode: Mode
    why: str


OVERRIDES: tuple[Override, ...] = (
    Override(
        lambda a: a.clients == "offline",
        Mode.BACKPRESSURE,
        "There is no time after which a refusal would serve an offline job better than its place in line.",
    ),
    Override(
        lambda a: a.may_drop is False,
        Mode.BACKPRESSURE,
        "Nothing may be dropped, so what cannot start is held until a place is free, and the wait is the price.",
    ),
    Override(
        lambda a: a.engine == "encoder" and a.clients != "offline" and (a.clients != "internal" or a.strict),
        Mode.HYBRID,
        "An engine that runs one batch at a time needs requests that wait: with a place now or none, every batch "
        "would be of one.",
    ),
    Override(
        lambda a: a.clients == "internal" and a.bounded is False,
        Mode.HYBRID,
        "Making senders wait needs senders that are bounded, and these are not: a queue of them grows without end. "
        "They wait within the wait budget and are refused beyond it.",
    ),
    Override(
        lambda a: a.clients == "internal" and a.strict,
        Mode.HYBRID,
        "An answer after the objective is worth little even to your own services, so only a short wait is allowed.",
    ),
)


@dataclass(frozen=True, slots=True)
class Addition:
    """A capability that comes after the beginning, the setting it lives in, and when it pays."""

    path: ConfigPath
    what: str
    when: str


LATER: dict[str, Addition] = {
    "tokens in flight": Addition(
        ("engines", "concurrency", "tokens"),
        "a bound on the expected tokens in flight",
        "when requests differ in cost by ten times: a bound in requests is then too high for the long ones or too low "
        "for the short ones",
    ),
    "hybrid": Addition(
        ("admission", "mode"),
        "the hybrid mode: a wait within the budget instead of a refusal at once",
        "when places stand empty between bursts while requests are refused within them",
    ),
    "keys": Addition(
        ("keys", "static"),
        "a key for each caller, with limits of its own",
        "as soon as callers can be told apart: those without a key share one allowance, which a single one can use up",
    ),
    "token envelope": Addition(
        ("keys", "static", "limits", "tokens_per_second"),
        "a token envelope per key",
        "when customers send requests of different lengths: requests per minute would charge a long one as a short one",
    ),
    "hold back": Addition(
        ("classes", "hold_back"),
        "priority classes, of which the lower ones leave places free",
        "when some callers matter more than others",
    ),
    "tuner": Addition(
        ("tuner", "kind"),
        "a queue depth that is found while it runs, in shadow beside the one that you set, or instead of it",
        "when the mix of requests changes during the day; until then the wait budget bounds whatever queues",
    ),
    "credits": Addition(
        ("keys", "store"),
        "prepaid credits and keys in a database",
        "when customers are billed by tokens",
    ),
    "shared limits": Addition(
        ("shared",),
        "budgets shared between several gateways",
        "when more than one gateway runs: until then each has limits of its own",
    ),
}


def exists(path: ConfigPath) -> bool:
    """Does this version act on the setting? False for one that it only accepts, and for one that it does not know."""
    if any(path[: len(later)] == later for later in NOT_YET):
        return False
    kind: Any = Config
    for name in path:
        if not is_section(kind):
            return False
        held = next((bare(info.type) for info in fields(kind) if info.encode_name == name), None)
        if held is None:
            return False
        if get_origin(held) in (tuple, dict):  # entries of a list, or of a map by their names
            held = bare(get_args(held)[0 if get_origin(held) is tuple else 1])
        kind = held
    return True


def situation(answers: Answers) -> tuple[Situation, Mode, str | None]:
    """The row of the matrix, the mode to begin with, and the reason when that is not the row's."""
    row = SITUATIONS["b2b" if answers.sells and answers.clients == "public" else answers.clients]
    for override in OVERRIDES:
        if override.applies(answers):
            return row, override.mode, override.why if override.mode is not row.mode else None
    return row, row.mode, None
