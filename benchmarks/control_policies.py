"""The policies that the control benchmark compares, as configurations of Forebay or as fronts of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.control_rivals import no_gateway, probabilistic_gate, vllm_caps
from benchmarks.control_world import TPOT_MS, TTFT_MS, MakeFront

FOREBAY = "forebay"
LEARNING = ("aimd", "vegas", "gradient2", "envoy")
SIGNALS = ("latency", "ttft", "per_token")
ARTICLE = ("article: backpressure", "article: admission", "article: hybrid")
FRONTS: dict[str, MakeFront] = {"none": no_gateway, "vllm caps": vllm_caps, "llm-d gate": probabilistic_gate}


@dataclass(frozen=True, slots=True)
class KeyClass:
    """Keys of one class."""

    name: str
    keys: tuple[str, ...]
    priority: int = 0
    weight: float = 1.0
    hold_back: float = 0.0


def config(
    concurrency: str,
    *,
    mode: str = "hybrid",
    fair: bool = False,
    admission: str = "",
    queue: str = "",
    classes: Sequence[KeyClass] = (),
) -> str:
    """A configuration whose only figures are the objectives, and what is given."""
    lines = ["[slo]", f"ttft_ms = {TTFT_MS:g}", f"tpot_ms = {TPOT_MS:g}"]
    lines += ["[admission]", f'mode = "{mode}"', f"fair_share = {str(fair).lower()}", admission]
    lines += ["[queue]", queue] if queue else []
    for one in classes:
        lines += [f"[classes.{one.name}]", f"priority = {one.priority}", f"weight = {one.weight:g}"]
        lines += [f"hold_back = {one.hold_back:g}"]
        for key in one.keys:
            lines += ["[[keys.static]]", f'id = "{key}"', f'secret = "secret-of-{key}"', f'class = "{one.name}"']
    lines += ["[[engines]]", 'name = "engine"', 'kind = "simulated"', f"concurrency = {{ {concurrency} }}"]
    return "\n".join(lines) + "\n"


def policy(name: str, *, classes: Sequence[KeyClass] = ()) -> str | MakeFront:
    """By name. `fixed 96` is a window of 96 per engine; `aimd ttft` goes by that signal; `forebay, unfair` lacks the
    fair share. Windows of others begin and end where Forebay's may, which is more room than their own defaults give.
    """
    if name in FRONTS:
        return FRONTS[name]
    if name == FOREBAY:
        return config('kind = "guarded"', fair=True, classes=classes)
    if name == "forebay, unfair":
        return config('kind = "guarded"', classes=classes)
    kind, _, setting = name.partition(" ")
    if kind == "fixed":
        return config(f'kind = "fixed", limit = {int(setting)}', classes=classes)
    if kind in LEARNING:
        # Envoy probes at its least, and takes a probe at a larger one for the fastest that there is.
        least = 3 if kind == "envoy" else 2
        return config(f'kind = "{kind}", limit = 20, least = {least}, signal = "{setting}"', classes=classes)
    return _article(name, classes)


def _article(name: str, classes: Sequence[KeyClass]) -> str:
    """The settings of the article's own listings, per engine: a batch of 8 and everybody waits; 32 in flight and
    nobody waits; 32 in flight, and 20 in all wait up to 100 ms. Its token gate never refills, and is left out."""
    if name == ARTICLE[0]:
        return config('kind = "fixed", limit = 8', mode="backpressure", classes=classes)
    if name == ARTICLE[1]:
        return config('kind = "fixed", limit = 32', mode="admission", classes=classes)
    if name == ARTICLE[2]:
        limits = "wait_budget_ms = 100", "depth_limit = 20"
        return config('kind = "fixed", limit = 32', admission=limits[0], queue=limits[1], classes=classes)
    raise ValueError(f"no policy is called {name!r}")
