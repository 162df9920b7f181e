"""How a request may end. Closed enums: metrics, status codes and tests enumerate them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Outcome(StrEnum):
    """Every ticket gets exactly one."""

    COMPLETED = "completed"  # the engine answered, whatever it said
    SHED = "shed"  # refused before queueing
    EVICTED = "evicted"  # removed after queueing
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"  # the engine broke, or could not be reached


class ShedReason(StrEnum):
    """Why a request was refused before it was queued."""

    KEY_REQUESTS = "key_requests"
    KEY_TOKENS = "key_tokens"
    KEY_CONCURRENCY = "key_concurrency"
    KEY_CREDITS = "key_credits"
    KEY_SHARE = "key_share"
    RETRY_BUDGET = "retry_budget"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    QUEUE_WAIT = "queue_wait"
    WARMING = "warming"
    NO_ENGINE = "no_engine"
    DRAINING = "draining"


class EvictReason(StrEnum):
    """Why a queued request was removed."""

    EXPIRED = "expired"
    DISPLACED = "displaced"
    NO_ENGINE = "no_engine"
    DRAINING = "draining"


class FailReason(StrEnum):
    """Why a dispatched request failed."""

    ENGINE_ERROR = "engine_error"
    ENGINE_TIMEOUT = "engine_timeout"
    OVER_BUDGET = "over_budget"  # it generated more than its key can pay, and was ended for that


Reason = ShedReason | EvictReason | FailReason

COMPLETED: Final = Outcome.COMPLETED
SHED: Final = Outcome.SHED
EVICTED: Final = Outcome.EVICTED
QUEUE_FULL: Final = ShedReason.QUEUE_FULL
QUEUE_WAIT: Final = ShedReason.QUEUE_WAIT
