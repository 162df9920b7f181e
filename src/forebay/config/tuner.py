"""The section of the queue-depth tuner."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from forebay.config.fields import Count, Milliseconds, Seconds, Section


class Tuner(Section, frozen=True):
    """How many may wait in hybrid mode, found while the gateway runs; queue.depth_limit sets it instead."""

    kind: Annotated[
        Literal["derived", "stepwise", "fixed"],
        Meta(
            description="derived: what the engines release within the wait budget, and room for its tail. stepwise: "
            "a published rule, by busy share and p99, to compare with. fixed: nobody moves it."
        ),
    ] = "derived"
    interval_s: Annotated[
        Seconds | None,
        Meta(description="Between two looks, in seconds. Unset: 2 (derived), 30 (stepwise).", examples=[2]),
    ] = None
    least: Annotated[
        Count | None, Meta(description="Never below this many. Unset: 1 (derived), 4 (stepwise).", examples=[4])
    ] = None
    most: Annotated[
        Count | None, Meta(description="Never above this many. Unset: 4096 (derived), 64 (stepwise).", examples=[512])
    ] = None
    wait_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="Wait behind a full queue that derived aims at, in ms, where the depth is to bound the wait by "
            "itself. Unset: the wait budget in force, with room for its tail.",
            examples=[200],
        ),
    ] = None
    frozen: Annotated[bool, Meta(description="Look and tell, but leave the depth as it is.")] = False
    shadow: Annotated[
        Literal["derived", "stepwise"] | None,
        Meta(
            description="A second tuner that sees the same and is not followed: what it would have done is counted and "
            "shown. It works beside a depth_limit that is set, too.",
            examples=["stepwise"],
        ),
    ] = None
    log: Annotated[Count, Meta(description="Changes that are kept with their figures, for each engine entry.")] = 64
