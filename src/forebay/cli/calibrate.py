"""`forebay sim calibrate`: fit the step model to an engine of one's own."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.engines.simulated.fitted import Fitted
    from forebay.engines.simulated.model import EngineLimits
    from forebay.engines.simulated.profile import StepProfile
    from forebay.load.told import Told
    from forebay.report.records import RequestRecord
    from forebay.sim.calibrate import Calibration

COUNT = click.IntRange(1)
VLLM_BATCHED_TOKENS = 2048
"""What vLLM's server takes on most GPUs (8,192 on those of 70 GiB and more, the A100 left out)."""
ROOMY_KV_TOKENS = 1 << 24
"""Where an engine does not tell: so much that it never binds."""
MOST_SCRAPES = 600
LEAST_DURATION_S, MOST_DURATION_S = 5.0, 3600.0


@click.command("calibrate", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", metavar="URL", help="The engine itself, otherwise idle; it is probed for --duration.")
@click.option(
    "--metrics",
    metavar="URL",
    help="Its /metrics. With --target: for the limits that it tells. Alone: fit from its counters while it serves.",
)
@click.option(
    "--records",
    "records_paths",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="Fit from what `forebay bench --records` kept of a run against the engine (begun when it was idle).",
)
@click.option("--write", "write_path", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE")
@click.option("--name", metavar="NAME", help="Name of the profile.  [default: the model's]")
@click.option("--model", metavar="M", help="Model to ask for.  [default: the first that the target lists]")
@click.option("--route", type=click.Choice(("completions", "chat")), default="completions", show_default=True)
@click.option("--key", metavar="SECRET", help="API key.")
@click.option("--max-num-seqs", type=COUNT, help="Largest batch of the engine.  [default: as it tells]")
@click.option(
    "--max-num-batched-tokens", type=COUNT, help=f"Tokens of one step.  [default: {VLLM_BATCHED_TOKENS}, as vLLM's]"
)
@click.option(
    "--max-mixed-tokens",
    type=click.IntRange(4),
    help="Tokens of a step that answers share with prompts, where the engine has such a bound (the embedded one: 64).",
)
@click.option("--kv-tokens", type=COUNT, help="KV cache in tokens.  [default: as it tells, else no bound]")
@click.option("--max-model-len", type=COUNT, help="Most tokens of a sequence.  [default: as it tells]")
@click.option("--longest-prompt", type=COUNT, default=2048, show_default=True, help="Longest prompt to probe with.")
@click.option("--duration", "duration_s", type=float, default=60.0, show_default=True, metavar="S", help="Seconds.")
@click.option("--seed", type=int, default=1, show_default=True)
def command(
    target: str | None,
    records_paths: tuple[Path, ...],
    write_path: Path,
    name: str | None,
    **given: Any,
) -> None:
    """Fits the simulator's step model to your engine, and writes it as a profile that --engine takes.

    A probing run finds all of it. What an engine counts while it serves tells less, and disturbs nobody.

    \b
    forebay sim calibrate --target http://127.0.0.1:8000 --max-num-seqs 256 --write my-gpu.json
    forebay sim calibrate --records run/1.jsonl --max-num-seqs 256 --write my-gpu.json
    forebay sim calibrate --metrics http://127.0.0.1:8000 --duration 600 --max-num-seqs 256 --write my-gpu.json
    """
    from rich.console import Console

    from forebay.engines.simulated.fitted import write_fitted
    from forebay.report.publish import check_writable
    from forebay.sim.calibrate import fit, fitted

    ways = [target is not None, bool(records_paths), target is None and given["metrics"] is not None]
    if sum(ways) != 1:
        raise UsageError(
            "say what to fit from: --target URL to probe an engine, --metrics URL alone to watch one, or --records FILE"
        )
    if not LEAST_DURATION_S <= given["duration_s"] <= MOST_DURATION_S:
        raise UsageError(f"--duration must lie within {LEAST_DURATION_S:g} and {MOST_DURATION_S:g} s")
    check_writable(write_path)
    told = _told(target, given)
    limits = _limits(told, given)
    blank = _blank(name or told.model, told.model, limits)
    console = Console(stderr=True)
    if records_paths:
        runs, source = _recorded(records_paths)
        calibration = fit(runs, limits, blank)
    elif target is not None:
        runs, source = _probed(target, told, limits, given, console)
        calibration = fit(runs, limits, blank)
    else:
        calibration, source = _watched(told, given, blank, console)
    content = fitted(calibration, limits, source)
    write_fitted(write_path, content)
    _print(Console(width=None if Console().is_terminal else 120), content)
    click.echo(f"written: {write_path} (use it as `forebay sim --engine {write_path}`)")


def _told(target: str | None, given: dict[str, Any]) -> Told:
    from forebay.load.target import Target
    from forebay.load.told import Told, ask

    if target is None and given["metrics"] is None:
        return Told(given["model"] or "recorded")
    target = target or given["metrics"].rstrip("/").removesuffix("/metrics")
    metrics = Target.parse(given["metrics"] or target, "--metrics")
    parsed = Target.parse(target)
    return ask(parsed, metrics if given["metrics"] or not given["max_num_seqs"] else None, given["model"])


def _limits(told: Told, given: dict[str, Any]) -> EngineLimits:
    from forebay.engines.simulated.model import EngineLimits

    seqs = given["max_num_seqs"] or told.max_num_seqs
    if seqs is None:
        raise UsageError("the engine does not tell its largest batch: give --max-num-seqs, as it was started with")
    try:
        return EngineLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=given["max_num_batched_tokens"] or max(VLLM_BATCHED_TOKENS, seqs),
            kv_tokens=given["kv_tokens"] or told.kv_tokens or ROOMY_KV_TOKENS,
            max_mixed_tokens=given["max_mixed_tokens"],
        )
    except ValueError as error:
        raise UsageError(f"these limits do not fit together: {error}") from None


def _recorded(paths: tuple[Path, ...]) -> tuple[list[list[RequestRecord]], str]:
    from forebay.report.records import read_run

    runs = [read_run(path).requests for path in paths]
    return runs, f"{sum(map(len, runs))} requests of {', '.join(path.name for path in paths)}"


def _probed(
    url: str, told: Told, limits: EngineLimits, given: dict[str, Any], console: Console
) -> tuple[list[list[RequestRecord]], str]:
    from forebay.load.child import end_in_order
    from forebay.load.probing import Bounds, probe_engine
    from forebay.load.target import Target
    from forebay.load.workload import Workload, parse_keys

    workload = Workload(route=given["route"], model=told.model, keys=parse_keys([given["key"]] if given["key"] else []))
    length = given["max_model_len"] or told.max_model_len
    if length is None:
        raise UsageError("the engine does not tell the longest sequence that it takes: give --max-model-len")
    bounds = Bounds(limits.max_num_seqs, min(length, limits.kv_tokens), given["longest_prompt"])
    end_in_order()
    with console.status("") as status:
        runs = probe_engine(
            Target.parse(url),
            workload,
            bounds,
            given["duration_s"],
            seed=given["seed"],
            on_probe=lambda what, count, at_s: status.update(f"{at_s:5.0f} s  {what}: {count} requests"),
        )
    return runs, f"{url}, {sum(map(len, runs))} requests in {len(runs)} probes, {_now()}"


def _watched(told: Told, given: dict[str, Any], blank: StepProfile, console: Console) -> tuple[Calibration, str]:
    from forebay.load.child import end_in_order
    from forebay.load.target import Target
    from forebay.load.told import watch
    from forebay.sim.windows import fit_windows, scrape_of, windows_of

    end_in_order()
    interval_s = max(0.5, given["duration_s"] / MOST_SCRAPES)
    with console.status("") as status:
        texts = watch(
            Target.parse(given["metrics"], "--metrics"),
            given["duration_s"],
            interval_s,
            lambda count: status.update(f"{count} scrapes of {given['duration_s'] / interval_s:.0f}"),
        )
    scrapes = [scrape for text in texts if (scrape := scrape_of(text, told.kv_tokens)) is not None]
    if not scrapes:
        raise UsageError(f"{given['metrics']} does not count the engine's steps: probe it with --target instead")
    windows = windows_of(scrapes)
    return fit_windows(windows, blank), f"{given['metrics']}, counters of {len(windows)} stretches of work, {_now()}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _blank(name: str, model: str, limits: EngineLimits) -> StepProfile:
    """A profile that has everything but coefficients."""
    from forebay.engines.simulated.profile import StepProfile

    return StepProfile(
        name=name,
        gpu="unknown",
        gpus=1,
        model=model,
        engine="calibrated",
        confidence="",
        c0=0.0,
        w=0.0,
        r=0.0,
        p=2.0,
        e=0.0,
        seq=0.0,
        kv=0.0,
        att=0.0,
        kv_tokens=limits.kv_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        decode_tokens_per_s={},
        prefill_tokens_per_s={},
        max_mixed_tokens=limits.max_mixed_tokens,
    )


UNITS = {
    "c0": ("ms", "every step"),
    "w": ("ms", "floor of a step: reading the weights"),
    "r": ("ms/token", "computing"),
    "p": ("", "sharpness of the knee between them"),
    "e": ("ms/token", "whatever the batch"),
    "seq": ("ms/sequence", "scheduling and sampling"),
    "kv": ("ms/1k tokens", "reading the context of answers"),
    "att": ("ms/1M pairs", "attention of prompts"),
    "front": ("ms", "before the scheduler"),
    "front_token": ("ms/token", "before the scheduler"),
}


def _print(console: Console, content: Fitted) -> None:
    from rich.table import Table

    table = Table("coefficient", "value", "± (1 σ)", "unit", "what", "not identified: it needs")
    for one in content.coefficients:
        unit, what = UNITS[one.name]
        # The sharpness is one of a few that were tried: it has no spread.
        error = "" if one.name == "p" else f"{one.error:.3g}" if one.error >= 0 else "unbounded"
        table.add_row(one.name, f"{one.value:.4g}", error, unit, what, one.wants)
    console.print(table)
    if content.profile.curve:
        points = ", ".join(f"{tokens:g}: {ms:.3g}" for tokens, ms in content.profile.curve)
        console.print(f"A free curve fits better than c0, w, r, p and e. Milliseconds by tokens in a step: {points}.")
    left = content.residuals
    if left.ttft_p50 is None:
        console.print(
            f"Mean step times are off by {left.tpot_p50 or 0.0:.1%} (median; 90 % within {left.tpot_p90 or 0.0:.1%})."
        )
    else:
        console.print(
            f"{left.requests} requests; replayed, time to first token is off by {left.ttft_p50:.1%} (median; 90 % of "
            f"requests within {left.ttft_p90 or 0.0:.1%}), time per token by {left.tpot_p50 or 0.0:.1%} "
            f"({left.tpot_p90 or 0.0:.1%})."
        )
    rates = ", ".join(f"{batch}: {rate:,.0f}" for batch, rate in content.profile.decode_tokens_per_s.items())
    console.print(f"Decode tokens/s by batch, 1,024 tokens of context each: {rates}.")
    console.print(f"Confidence: {content.profile.confidence}.")
