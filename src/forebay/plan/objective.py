"""What the user asks for: bounds in milliseconds, the share that must keep them, the share that may be refused."""

from __future__ import annotations

import math

import msgspec

from forebay.errors import UsageError

MS_MOST = 86_400_000.0


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """A request is good when it completes within every bound that is set.

    `attainment` is the least share of good requests among those that were not refused; `max_shed` the largest share of
    all requests that may be refused, before the queue or in it. Both of 1.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    attainment: float = 0.99
    max_shed: float = 0.01

    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by name."""
        named = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "latency": self.latency_ms}
        return {name: bound for name, bound in named.items() if bound is not None}

    def __str__(self) -> str:
        words = {"ttft": "first token within", "tpot": "every further one within", "latency": "all of it within"}
        parts = [f"{words[name]} {_ms(bound)}" for name, bound in self.bounds().items()]
        return (
            f"{', '.join(parts)} for {100 * self.attainment:g} % of admitted requests, "
            f"at most {100 * self.max_shed:g} % refused"
        )


def objective(
    *,
    ttft_ms: float | None,
    tpot_ms: float | None,
    latency_ms: float | None,
    attainment_percent: float,
    max_shed_percent: float,
) -> Objective:
    """An objective from what a person typed. Raises UsageError that names the flag."""
    bounds = {"--ttft-ms": ttft_ms, "--tpot-ms": tpot_ms, "--latency-ms": latency_ms}
    if all(bound is None for bound in bounds.values()):
        raise UsageError("there is no objective: give --ttft-ms, --tpot-ms or --latency-ms, or several")
    for flag, bound in bounds.items():
        if bound is not None and not (math.isfinite(bound) and 0 < bound <= MS_MOST):
            raise UsageError(f"{flag} {bound:g}: milliseconds above 0 and up to a day ({MS_MOST:.0f}) are asked")
    if ttft_ms is not None and latency_ms is not None and latency_ms < ttft_ms:
        raise UsageError(
            f"--latency-ms {latency_ms:g} is below --ttft-ms {ttft_ms:g}: a whole answer cannot end before it begins; "
            "leave --ttft-ms out, or lower it"
        )
    if not 0 < attainment_percent < 100:
        raise UsageError(
            f"--attainment {attainment_percent:g}: a percentage above 0 and below 100 is asked, such as 99"
        )
    if not 0 <= max_shed_percent < 100:
        raise UsageError(f"--max-shed {max_shed_percent:g}: a percentage from 0 and below 100 is asked, such as 1")
    return Objective(
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        latency_ms=latency_ms,
        attainment=attainment_percent / 100,
        max_shed=max_shed_percent / 100,
    )


def _ms(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
