"""Which trials are run: first those that choose windows and signals, on seeds of their own, then the benchmark's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from benchmarks.control_cases import A100, H100, Figures, Trial
from benchmarks.control_policies import ARTICLE, FOREBAY, FRONTS, LEARNING, SIGNALS
from benchmarks.control_world import MIXES

PILOT_SEEDS = (101, 102)
PILOT_LOAD = 2.0
LOADS = (1.2, 2.0, 5.0, 10.0)
MORE_LOADS = (0.5, 0.8, 0.95, 1.0, 1.5)
BASES = (0.5, 0.7, 0.85, 0.95)
WINDOWS = {
    A100: (8, 12, 16, 20, 32, 48, 64, 80, 96, 104, 112, 120, 128, 160, 200, 256),
    H100: (128, 240, 264, 288, 312, 352),
}
"""Requests in flight per engine that are tried by hand."""
HOLD_BACK = 0.05
"""Told for the class that is not critical."""

Run = Callable[[Sequence[Trial]], dict[Trial, Figures]]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the pilot found best: windows by profile and mix, signals by policy, and every figure it went by."""

    windows: dict[str, dict[str, int]]
    sweep: dict[str, dict[str, dict[int, float]]]
    """By profile, mix and window: weighted tokens of good requests, of the bound."""
    signals: dict[str, str]
    tried: dict[str, float]

    def fixed(self, profile: str, mix: str) -> str:
        """The policy of the best window for a mix."""
        return f"fixed {self.windows[profile][mix]}"

    @property
    def single(self) -> int:
        """The window with the best mean over the mixes."""
        sweep = self.sweep[A100]
        return max(WINDOWS[A100], key=lambda window: fmean(sweep[mix][window] for mix in MIXES))

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self) | {"single": self.single}


def pilot(run: Run, scale: float, seeds: Sequence[int]) -> Chosen:
    """Tries every window on every mix, and every signal on chat."""
    mixes = {A100: tuple(MIXES), H100: ("chat",)}
    windows = {
        (profile, mix, window): [
            Trial("goodput", f"fixed {window}", seed, PILOT_LOAD, profile, mix, scale) for seed in seeds
        ]
        for profile in mixes
        for mix in mixes[profile]
        for window in WINDOWS[profile]
    }
    signals = {
        f"{kind} {signal}": [Trial("goodput", f"{kind} {signal}", seed, PILOT_LOAD, scale=scale) for seed in seeds]
        for kind in LEARNING
        for signal in SIGNALS
    }
    found = run([trial for trials in (*windows.values(), *signals.values()) for trial in trials])

    def mean(trials: Sequence[Trial]) -> float:
        return fmean(found[trial]["weighted"] or 0.0 for trial in trials)

    sweep: dict[str, dict[str, dict[int, float]]] = {}
    for (profile, mix, window), trials in windows.items():
        sweep.setdefault(profile, {}).setdefault(mix, {})[window] = mean(trials)
    tried = {name: mean(trials) for name, trials in signals.items()}
    return Chosen(
        windows={
            profile: {mix: max(by_window, key=by_window.__getitem__) for mix, by_window in by_mix.items()}
            for profile, by_mix in sweep.items()
        },
        sweep=sweep,
        signals={kind: max(SIGNALS, key=lambda signal: tried[f"{kind} {signal}"]) for kind in LEARNING},
        tried=tried,
    )


def plan(cases: Sequence[str], seeds: Sequence[int], scale: float, chosen: Chosen) -> list[Trial]:
    """Every trial of the cases asked for."""
    best = chosen.fixed(A100, "chat")
    learning = [f"{kind} {signal}" for kind, signal in chosen.signals.items()]
    everybody = [FOREBAY, best, *learning, *FRONTS, *ARTICLE]
    pairs: dict[str, list[tuple[str, float, str, str]]] = {
        "goodput": [
            *((policy, load, A100, "chat") for policy in everybody for load in LOADS),
            *((FOREBAY, load, A100, "chat") for load in MORE_LOADS),
            *((policy, load, A100, "rag") for load in (2.0, 10.0) for policy in (FOREBAY, chosen.fixed(A100, "rag"))),
            *((policy, 2.0, A100, "long") for policy in (FOREBAY, chosen.fixed(A100, "long"))),
            *((policy, 2.0, H100, "chat") for policy in (FOREBAY, chosen.fixed(H100, "chat"), "none")),
            (FOREBAY, 10.0, H100, "chat"),
        ],
        "spike": [
            *((policy, base, A100, "chat") for policy in (FOREBAY, best) for base in BASES),
            *((policy, base, A100, "chat") for policy in ("vllm caps", "llm-d gate", ARTICLE[2], "none")
              for base in (0.5, 0.85)),
        ],
        "flood": [
            *((policy, load, A100, "chat") for policy in (FOREBAY, "forebay, unfair") for load in (0.9, 2.0)),
            *((policy, 0.9, A100, "chat") for policy in (best, "llm-d gate")),
        ],
        "shift": [(policy, 2.0, A100, "chat") for policy in (FOREBAY, *learning, "llm-d gate", *_statics(chosen))],
        "critical": [(policy, 10.0, A100, "chat")
                     for policy in (FOREBAY, f"{FOREBAY} + {HOLD_BACK}", f"{best} + {HOLD_BACK}", "llm-d gate")],
        "hang-ups": [(FOREBAY, load, A100, "chat") for load in (2.0, 10.0)],
    }  # fmt: skip
    return [
        Trial(case, policy, seed, load, profile, mix, scale)
        for case in cases
        for policy, load, profile, mix in pairs[case]
        for seed in seeds
    ]


def _statics(chosen: Chosen) -> list[str]:
    """Windows that are best for something, and some between."""
    best = {*chosen.windows[A100].values(), chosen.single}
    return [f"fixed {window}" for window in WINDOWS[A100] if window in best or window in {16, 32, 64}]
