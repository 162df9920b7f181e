"""`forebay engine`: stand-alone OpenAI-style engines, the bundled model or a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.options import together
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.engines.serving import ServedEngine
    from forebay.engines.simulated.embedder import SimulatedEncoder
    from forebay.engines.simulated.engine import SimulatedEngine
    from forebay.engines.simulated.faults import Faults
    from forebay.engines.simulated.profile import EncoderProfile, Profile, StepProfile

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

host_option = click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
port_option = click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes any free one."
)
POSITIVE = click.FloatRange(min=0, min_open=True)
SHARE = click.FloatRange(0, 1)


@click.group(name="engine", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Run a stand-alone OpenAI-style engine."""


@command.command()
@host_option
@port_option
@click.option(
    "--model",
    "model_path",
    type=click.Path(exists=True, dir_okay=False),
    help="Weights (GGUF) instead of the bundled model, which is fetched once.",
)
@click.option("--slots", type=click.IntRange(1), help="Largest batch.  [default: 32]")
@click.option(
    "--context", type=click.IntRange(16), help="Most tokens of a sequence, prompt and answer.  [default: 512]"
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: all]")
def embedded(host: str, port: int, model_path: str | None, **sizes: int | None) -> None:
    """Run a real, small language model on this machine's CPU."""
    from forebay.engines import embedded as engines
    from forebay.engines.serving.server import run

    if model_path is None:
        from forebay.engines.embedded import weights

        model_path = str(weights.fetch(lambda line: click.echo(line, err=True)))
    given = {name: size for name, size in sizes.items() if size is not None}
    engine: ServedEngine = engines.build(model_path, **given)
    run(engine, host, port, on_started=_announce(host))


# One flag for each of `simulated.faults.Faults`; what they mean is written there.
fault_options = together(
    click.option("--cold-start-s", type=click.FloatRange(0), help="Answer 503 for so long after the start."),
    click.option("--error-rate", type=SHARE, help="Share of requests that fail at once."),
    click.option("--error-status", type=click.IntRange(400, 599), help="Status of those.  [default: 500]"),
    click.option(
        "--max-num-queued-reqs",
        type=click.IntRange(1),
        help="Refuse with 503 (no Retry-After) while so many wait or run, as vLLM does.",
    ),
    click.option(
        "--refuse-inside-stream",
        is_flag=True,
        default=None,
        help="Refuse streams with an error event inside a 200, as vLLM may.",
    ),
    click.option("--stall-s", type=click.FloatRange(0), help="Make no token for so long, once."),
    click.option("--stall-after", type=click.IntRange(0), help="Stall when so many requests have come."),
    click.option("--crash-after", type=click.IntRange(1), help="Die after so many requests."),
    click.option("--error-after-tokens", type=click.IntRange(1), help="Fail every answer after so many tokens."),
    click.option("--slow-factor", type=POSITIVE, help="Every step takes so many times longer."),
    click.option("--usage-factor", type=click.FloatRange(0), help="Report so many times the real usage."),
    click.option("--omit-usage", is_flag=True, default=None, help="Never report usage."),
    click.option("--hang-rate", type=SHARE, help="Share of requests that are never answered."),
)


@command.command()
@host_option
@port_option
@click.option("--profile", "profile_name", metavar="NAME", help="Calibrated GPU and model.  [default: H100, 8B]")
@click.option("--list-profiles", is_flag=True, help="Print the profiles and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --list-profiles: as JSON.")
@click.option("--model-name", help="Name of the model to clients.  [default: the profile's]")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Largest batch.  [default: the profile's]")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Tokens per step.  [default: the profile's]")
@click.option("--kv-tokens", type=click.IntRange(1), help="KV cache in tokens.  [default: the profile's]")
@click.option("--max-model-len", type=click.IntRange(2), help="Most tokens of a sequence.")
@click.option("--time-scale", type=POSITIVE, default=1.0, show_default=True, help="Simulated seconds per real second.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of texts, lengths and chance.")
@click.option(
    "--output-mean",
    type=click.FloatRange(1),
    default=200.0,
    show_default=True,
    help="Mean tokens of answers that end by themselves.",
)
@click.option(
    "--output-sigma",
    type=click.FloatRange(0, 5),
    default=0.7,
    show_default=True,
    help="Spread of those: standard deviation of the logarithm.",
)
@click.option(
    "--prefix-hit",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of each prompt found in the prefix cache.",
)
@click.option("--noise", type=SHARE, default=0.0, show_default=True, help="Relative standard deviation of step times.")
@click.option("--reserve-output", is_flag=True, help="Admit only what fits with its whole output: no preemption.")
@fault_options
def simulated(
    host: str, port: int, profile_name: str | None, list_profiles: bool, as_json: bool, **options: Any
) -> None:
    """Run a simulated GPU: calibrated step times, continuous batching, KV limit, faults on demand.

    Profiles of encoders serve /v1/embeddings, all others chat and completions. On this machine, GET, POST and
    DELETE on /faults show, change and heal the injected faults.
    """
    from forebay.engines.serving.server import run
    from forebay.engines.simulated.catalog import DEFAULT_PROFILE, profile_named, profiles
    from forebay.engines.simulated.profile import StepProfile

    if list_profiles:
        _print_profiles(profiles(), as_json=as_json)
        return
    if as_json:
        raise UsageError("--json goes with --list-profiles")
    profile = profile_named(profile_name or DEFAULT_PROFILE)
    faults = _faults(options)
    try:
        engine: SimulatedEngine | SimulatedEncoder
        if isinstance(profile, StepProfile):
            engine = _language_model(profile, options, faults)
        else:
            engine = _encoder(profile, options, faults)
    except ValueError as error:
        raise UsageError(str(error)) from None
    run(engine, host, port, on_started=_announce(host), controls={"/faults": engine.control})


def _language_model(profile: StepProfile, options: dict[str, Any], faults: Faults) -> SimulatedEngine:
    from forebay.engines.simulated.engine import SimulatedEngine
    from forebay.engines.simulated.model import EngineLimits

    limits = EngineLimits(
        max_num_seqs=options["max_num_seqs"] or profile.max_num_seqs,
        # Only an explicit choice may be too small for the batch.
        max_num_batched_tokens=options["max_num_batched_tokens"]
        or max(profile.max_num_batched_tokens, options["max_num_seqs"] or 0),
        kv_tokens=options["kv_tokens"] or profile.kv_tokens,
        reserve_output=options["reserve_output"],
        max_mixed_tokens=profile.max_mixed_tokens,
    )
    return SimulatedEngine(
        profile,
        limits,
        model_id=options["model_name"],
        max_model_len=options["max_model_len"] or 131_072,
        time_scale=options["time_scale"],
        seed=options["seed"],
        output_mean=options["output_mean"],
        output_sigma=options["output_sigma"],
        prefix_hit=options["prefix_hit"],
        noise=options["noise"],
        faults=faults,
    )


def _encoder(profile: EncoderProfile, options: dict[str, Any], faults: Faults) -> SimulatedEncoder:
    from forebay.engines.simulated.embedder import MAX_BATCH, SimulatedEncoder

    for name in ("max_num_batched_tokens", "kv_tokens"):
        if options[name] is not None:
            raise UsageError(f"--{name.replace('_', '-')} means nothing to the encoder {profile.name}")
    return SimulatedEncoder(
        profile,
        max_batch=options["max_num_seqs"] or MAX_BATCH,
        model_id=options["model_name"],
        max_model_len=options["max_model_len"] or 512,
        time_scale=options["time_scale"],
        seed=options["seed"],
        faults=faults,
    )


def _faults(options: dict[str, Any]) -> Faults:
    import msgspec

    from forebay.engines.simulated.faults import Faults

    given = {name: options[name] for name in Faults.__struct_fields__ if options[name] is not None}
    try:
        return msgspec.convert(given, Faults)
    except msgspec.ValidationError as error:
        raise UsageError(f"fault settings: {error}") from None


def _print_profiles(known: dict[str, Profile], *, as_json: bool) -> None:
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from forebay.engines.simulated.profile import StepProfile

    if as_json:
        rows = [
            {"kind": "llm" if isinstance(one, StepProfile) else "encoder", **msgspec.to_builtins(one, str_keys=True)}
            for one in known.values()
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
        return
    table = Table("profile", "KV tokens", "seqs / tokens per step", "decode tok/s at 1 / 32 / 128", "confidence")
    for one in known.values():
        if isinstance(one, StepProfile):
            rates = " / ".join(
                f"{one.decode_tokens_per_s[batch]:,.0f}" if batch in one.decode_tokens_per_s else "–"
                for batch in (1, 32, 128)
            )
            limits = f"{one.max_num_seqs:,} / {one.max_num_batched_tokens:,}"
            table.add_row(one.name, f"{one.kv_tokens:,}", limits, rates, one.confidence)
        else:
            rates = " / ".join(f"{size / one.batch_ms(size) * 1e3:,.0f}" for size in (1, 32, 128))
            table.add_row(one.name, "", "encoder", f"{rates} inputs/s", "")
    Console(width=None if Console().is_terminal else 160).print(table)


def _announce(host: str) -> Callable[[int], None]:
    shown = f"[{host}]" if ":" in host else host

    def announce(port: int) -> None:
        click.echo(f"listening on http://{shown}:{port}")  # flushed by click: who started us waits for it

    return announce
