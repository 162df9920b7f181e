"""The things that move through the pipeline: a request becomes a ticket, a ticket gets a lease, a lease ends in usage.

These are msgspec structs because one of each is made per request on the hot path. They compare by identity.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from forebay.core.instant import SECOND, Instant
from forebay.core.outcome import Outcome, Reason

OBEYED_NS = 60 * SECOND
"""Every official library keeps to a time to come back of up to so long; with a longer one they do as they like."""


class Mode(StrEnum):
    """What happens to a request that cannot start at once."""

    BACKPRESSURE = "backpressure"  # it is held until a lease or its deadline
    ADMISSION = "admission"  # it is refused
    HYBRID = "hybrid"  # it waits while the predicted wait is within the wait budget, else it is refused


BACKPRESSURE: Final = Mode.BACKPRESSURE
HYBRID: Final = Mode.HYBRID
"""Bound once, like others below: Python searches an enum's class each time that a member is named, 60 ns in 3.11, and a
decision names dozens."""


class ByteClass(IntEnum):
    """The script of a text and how a body spells it; each has its own tokens per byte.

    The script is that of the first character beyond ASCII. The escaped spelling of one is `ESCAPED` after it.
    """

    ASCII = 0
    LATIN = 1  # with accents
    ALPHABET = 2  # letters of two bytes: Cyrillic, Greek, Arabic, Hebrew
    INDIC = 3  # letters of three: Devanagari, Thai and their neighbours
    WIDE = 4  # ideographs, kana, Hangul, symbols, emoji
    ESCAPED_LATIN = 5  # JSON \\uXXXX escapes
    ESCAPED_ALPHABET = 6
    ESCAPED_INDIC = 7
    ESCAPED_WIDE = 8


ESCAPED = ByteClass.ESCAPED_LATIN - ByteClass.LATIN


class Demand(msgspec.Struct, frozen=True, gc=False):
    """The cost of a request as estimated at admission, in tokens."""

    input_tokens: int
    output_tokens: int  # expected, for waits, balance and fairness
    output_reserved: int  # charged to the key until the real usage is known
    output_guessed: bool = False  # the caller set no cap: a guess is no reason to say that it never fits
    cached_tokens: int = 0  # of the input, what the engine is expected to have in its prefix cache

    @property
    def tokens(self) -> int:
        """Expected tokens in and out."""
        return self.input_tokens + self.output_tokens

    @property
    def work(self) -> int:
        """Expected work: an output token costs an engine about what two prompt tokens do, a cached one nothing."""
        return self.input_tokens - self.cached_tokens + 2 * self.output_tokens

    @property
    def reserved(self) -> int:
        """Tokens held from the key's budgets."""
        return self.input_tokens + self.output_reserved


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What a request really used, in tokens."""

    input_tokens: int
    output_tokens: int
    exact: bool = True  # False: counted by us, because the engine never said
    cached_tokens: int = 0  # of the input, what the engine had in its prefix cache
    forgiven_tokens: int = 0  # of those, what the key is not charged

    @property
    def tokens(self) -> int:
        """Tokens in and out."""
        return self.input_tokens + self.output_tokens

    @property
    def charged_input(self) -> int:
        """Input tokens that a key is charged. Usage is an engine's word: a negative one would mint tokens."""
        tokens = self.input_tokens - self.forgiven_tokens
        return tokens if tokens > 0 else 0

    @property
    def work(self) -> int:
        """Work that was done, as in `Demand.work`; an engine's absurd word of it counts as none."""
        return max(0, self.input_tokens - self.cached_tokens) + 2 * max(0, self.output_tokens)


NOTHING_USED = Usage(0, 0)


class Request(msgspec.Struct, eq=False):
    """What an adapter offers to the pipeline. Sizes are bytes, counts are tokens, times are instants."""

    key: str
    model: str = ""
    route: str = "chat"
    owner: Any = None  # the adapter's own handle; the core never looks inside
    body_bytes: int = 0
    text_bytes: int = 0  # bytes that are text: base64 payloads and JSON frame taken out
    byte_class: ByteClass = ByteClass.ASCII
    counted_tokens: int = 0  # input known exactly or priced apart: token ids, images
    max_output_tokens: int | None = None
    choices: int = 1
    generates: bool = True  # False for embeddings, rerank and the like: no output tokens
    stream: bool = False
    priority: int = 0  # higher goes first
    priority_class: str = "default"
    mode: Mode | None = None  # None: the pool's own
    deadline: Instant | None = None  # when the whole answer is of no use any more
    patience: Instant | None = None  # when the caller leaves if nothing of the answer has come
    flow: str = ""  # unit of fairness; empty means the key
    weight: float = 1.0  # of its flow among the others
    hold_back: float = 0.0  # share of the pool's places that it leaves to classes above it
    wait_budget_ns: int = 0  # of its class; 0: the pool's
    ttft_ns: int = 0  # objective for the first token, of its class; 0: the pool's
    obeys_ns: int = OBEYED_NS  # longest time to come back that the caller's library keeps to
    retries: int | None = None  # how often it was sent before; None: nothing says
    tokens_per_byte: float = 0.0  # of its text, as the bytes suggest; 0: nobody looked at them
    media_tokens: int = 0  # images, sound and files, at list prices
    prefix: int = 0  # hash of how its prompt begins, 64 bits, where the pool's balancer asks for it; 0: not known
    shadow: tuple[Any, ...] = ()  # what settings in shadow said of it; the pipeline sets it where there are any
    holds_place: bool = False  # its caller showed a retry ticket; the pipeline takes it back when no such place is left


class EngineSignal(NamedTuple):
    """What an engine says of itself. None: it does not say. It may count work that others sent to it."""

    running: int | None = None  # requests in its batch
    waiting: int | None = None  # requests in a queue of its own
    kv_share: float | None = None  # used share of its KV cache, 0 to 1
    kv_tokens: int | None = None  # what that cache holds in all
    preemptions: int | None = None  # since it started
    queue_wait_ns: int | None = None  # mean time in its own queue, of the requests since it last said so
    service_ns: int | None = None  # mean time of the work on them alone, from an engine that tells the two apart


class TicketState(IntEnum):
    """Where a ticket is."""

    QUEUED = 0
    IN_FLIGHT = 1
    CLOSED = 2


QUEUED: Final = TicketState.QUEUED
IN_FLIGHT: Final = TicketState.IN_FLIGHT
CLOSED: Final = TicketState.CLOSED


class Ticket(msgspec.Struct, eq=False):
    """One request inside the pipeline, from its offer to its one outcome."""

    request: Request
    demand: Demand
    pool: Any  # the Pool it waits for
    sequence: int
    arrived: Instant
    mode: Mode
    path: Any = None  # the limits it was charged to, level by level
    paid_output: int = 0  # output tokens that its key has paid for so far
    fair: Any = None  # the FairShare that it counts in; None: none is kept
    state: TicketState = TicketState.QUEUED
    met_queue: bool = False
    predicted_wait_ns: int = 0
    wait_budget_ns: int = 0
    expires: Instant = 0
    band: float = 0  # where it stands: its priority, or above all when its floor owes it a turn; a holder half above
    start_tag: float = 0.0
    turn: int = 0  # which of the queue's turns it has
    redispatched: bool = False
    gives_way: bool = False  # a return that waits for what new requests leave, in a line of its own
    lease: Lease | None = None
    dispatched: Instant = 0
    first_token: Instant = 0
    closed: Instant = 0
    usage: Usage | None = None
    outcome: Outcome | None = None
    reason: Reason | None = None
    refusal: Refusal | None = None  # what one that was evicted is told
    figures: Any = None  # behind its admission, where somebody keeps them

    @property
    def queue_wait_ns(self) -> int:
        """Enqueue to dispatch, or to the end for one that never left the queue."""
        return (self.dispatched or self.closed) - self.arrived


class Batch(msgspec.Struct, eq=False):
    """Requests dispatched together; they share one place on the engine, free again when the last has ended."""

    size: int
    open: int


class Lease(msgspec.Struct, eq=False):
    """The right to occupy an engine. It lives as long as its request and is closed exactly once."""

    ticket: Ticket
    engine: Any  # the dispatch room's Engine
    tokens: int  # demand held on the engine
    opened: Instant
    batch: Batch | None = None  # None: it went alone
    open: bool = True
    generated: int = 0  # output tokens streamed so far; the driver keeps it, where it can see them
    counted: int = 1  # of these, taken into account by the engine's limit; before the first token there is no gap


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """A verdict against a request: the reason, when to come back, and the figures behind it."""

    reason: Reason
    retry_after_ns: int | None  # None: a retry cannot work
    limit: float = 0  # the limit that was met, in the reason's own unit
    actual: float = 0  # what was measured or asked against it
    unit: str = ""
    obeyed: bool = True  # False: the caller's library would come back too early, in vain
    level: str = ""  # whose limit it was, when keys share it: this key, team x
    reserved: bool = False  # a place is kept for then: whoever shows a retry ticket has it
