"""Settings in shadow: each section's, under `shadow`, by the names that they have in it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from forebay.config.fields import Amount, Milliseconds, Seconds, Section


class Retry(Section, frozen=True):
    """When a refused caller is told to come back: how much of what a pool can serve is promised to returns."""

    headroom: Annotated[
        Annotated[float, Meta(ge=0, le=0.9)], Meta(description="Share of it that is promised to nobody.")
    ] = 0.06
    share_least: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(description="Share of it that is promised, however busy the pool usually is."),
    ] = 0.02
    share_most: Annotated[
        Annotated[float, Meta(gt=0, le=1)], Meta(description="Share of it that is promised when the pool is idle.")
    ] = 0.95
    beyond_s: Annotated[
        Seconds,
        Meta(
            description="Callers who get no promise are told a time up to so much beyond what their library keeps to, "
            "in seconds."
        ),
    ] = 60


class AdmissionShadow(Section, frozen=True):
    """Settings of [admission] that are tried beside the ones in force, and not followed; what they would have decided
    is counted and shown."""

    wait_budget_ms: Annotated[
        Milliseconds | None, Meta(description="Another wait budget, in ms. Unset: the one in force.", examples=[100])
    ] = None
    late_share: Annotated[
        Annotated[float, Meta(gt=0, le=0.5)] | None,
        Meta(description="Another share that may be late. Unset: the one in force.", examples=[0.05]),
    ] = None
    tail_z: Annotated[
        Annotated[float, Meta(ge=0, le=5)] | None,
        Meta(description="Another allowance for uneven releases. Unset: the one in force.", examples=[2.0]),
    ] = None
    floor_slots: Annotated[
        Annotated[float, Meta(ge=0, le=1000)] | None,
        Meta(description="Another least budget, in slots. Unset: the one in force.", examples=[1.0]),
    ] = None
    fair_share: Annotated[bool, Meta(description="Keep fair shares, and refuse nobody for them.")] = False
    retry_budget: Annotated[bool, Meta(description="Keep retry budgets, and refuse nobody for them.")] = False
    retry: Annotated[Retry | None, Meta(description="Another way to tell refused callers when to come back.")] = None
    waiting_room: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Another number of places in the waiting room. Unset: the one in force.", examples=[1000]),
    ] = None
    waiting_room_s: Annotated[
        Seconds | None,
        Meta(description="Another longest wait there, in seconds. Unset: the one in force.", examples=[120]),
    ] = None


class QueueShadow(Section, frozen=True):
    """Settings of [queue] that are tried beside the ones in force, and not followed."""

    depth_limit: Annotated[
        Amount | None,
        Meta(
            description="Another depth, beside one that is set or tuned; it goes before [tuner] shadow. Unset: none is "
            "tried.",
            examples=[64],
        ),
    ] = None
    order: Annotated[
        Literal["earliest", "adaptive"] | None,
        Meta(description="Another order. Unset: none is tried.", examples=["adaptive"]),
    ] = None


class ClassShadow(Section, frozen=True):
    """Settings of a class that are tried beside the ones in force, and not followed."""

    hold_back: Annotated[
        Annotated[float, Meta(ge=0, le=0.9)] | None,
        Meta(description="Another share of the places to hold back. Unset: none is tried.", examples=[0.2]),
    ] = None
    floor_share: Annotated[
        Annotated[float, Meta(ge=0, le=0.5)] | None,
        Meta(description="Another floor. Unset: none is tried.", examples=[0.1]),
    ] = None


class EngineShadow(Section, frozen=True):
    """Settings of an engine entry that are tried beside the ones in force, and not followed."""

    balance: Annotated[
        Literal["least", "p2c", "affinity", "random"] | None,
        Meta(description="Another choice among its URLs. Unset: none is tried.", examples=["affinity"]),
    ] = None
