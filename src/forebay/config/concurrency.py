"""How much one engine may hold: the limit that is followed, and one in its shadow."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from forebay.config.fields import Count, Section


class Window(Section, frozen=True):
    """A limit beside the acting one: it is told the same, and only says what it would have allowed."""

    kind: Annotated[
        Literal["fixed", "guarded", "aimd", "vegas", "gradient2", "envoy"] | None,
        Meta(
            description="fixed: set here and moved by nobody. guarded: as many as the objectives in [slo] and the "
            "engine's memory allow, found by itself. The others are known algorithms, to compare with. Unset: fixed "
            "where limit or tokens is set or batches are formed here, else guarded.",
            examples=["guarded"],
        ),
    ] = None
    limit: Annotated[
        Count | None,
        Meta(
            description="Requests in flight on one URL: the limit when fixed (the engine's own batch size fits; unset: "
            "64), else where it begins (unset: 16).",
            examples=[64],
        ),
    ] = None
    least: Annotated[Count, Meta(description="Never below this many (not fixed).")] = 2
    most: Annotated[Count, Meta(description="Never above this many (not fixed).")] = 1024
    tokens: Annotated[
        Count | None,
        Meta(
            description="Expected tokens in flight on one URL; a larger request runs alone. Unset: no bound.",
            examples=[200_000],
        ),
    ] = None
    kv_tokens: Annotated[
        Count | None,
        Meta(
            description="Tokens that the engine's KV cache holds (guarded); vLLM logs it at start. Unset: not guarded.",
            examples=[450_000],
        ),
    ] = None
    signal: Annotated[
        Literal["latency", "ttft", "per_token"],
        Meta(description="Response time that aimd, vegas, gradient2 and envoy go by."),
    ] = "latency"


class Concurrency(Window, frozen=True):
    """How much one engine may hold at once."""

    shadow: Annotated[Window | None, Meta(description="A second limit, which is not followed.")] = None
