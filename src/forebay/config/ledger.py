"""The section of the ledger: where use is written down first, and how credit is leased."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from forebay.config.fields import Count, Milliseconds, Seconds, Section, Text


class Ledger(Section, frozen=True):
    """How what keys use reaches the store, and how credit comes from it. Without [keys] store it has no effect."""

    journal: Annotated[
        Text,
        Meta(
            description="Folder of the journal, where use is written before the store has it. On a disk of this "
            "machine; each gateway needs its own."
        ),
    ] = "forebay-journal"
    write_interval_ms: Annotated[
        Milliseconds,
        Meta(description="Longest that a settlement is in memory only, in ms: what the end of the process may cost."),
    ] = 10
    sync_interval_ms: Annotated[
        Milliseconds,
        Meta(
            description="Time between two syncs to the disk, in ms: what a loss of power may cost. Open streams of "
            "prepaid keys are metered as often."
        ),
    ] = 50
    post_interval_ms: Annotated[
        Milliseconds, Meta(description="Time between two postings to the store, in ms; each is one transaction.")
    ] = 1000
    journal_max_bytes: Annotated[
        Count,
        Meta(
            description="Size of the journal at which it counts as full, since the store takes nothing from it: about "
            "20 million settlements."
        ),
    ] = 1024 * 1024 * 1024
    lease_tokens: Annotated[
        Count,
        Meta(
            description="Credit that is leased for a key at a time; a busy key's leases grow to a hundred times this. "
            "Less leaves more to other gateways, more asks the store less often."
        ),
    ] = 20_000
    lease_ttl_s: Annotated[
        Seconds,
        Meta(
            description="Time after which the leases of a gateway that is not heard of are given back, in seconds. "
            "Prepaid keys are served through three quarters of it while the store is away."
        ),
    ] = 300
    lease_wait_s: Annotated[
        Seconds, Meta(description="Longest that a request waits for its key's credit to be leased, in seconds.")
    ] = 2
    lease_idle_s: Annotated[
        Seconds, Meta(description="Time without a request after which a key's lease is given back, in seconds.")
    ] = 60
    waiting_limit: Annotated[
        Count, Meta(description="Requests that may wait for credit at once; their bodies are in memory.")
    ] = 1000
