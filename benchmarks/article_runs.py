"""Claims of the article that are simulated: production policies, calibrated engines, shipped traces, fixed seeds."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from benchmarks.article_figures import A100_8B, BERT_INT8, H100_8B, encoder, language_model
from forebay.core.events import EngineUp
from forebay.core.instant import SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode as CoreMode
from forebay.core.model import Request, Ticket
from forebay.core.outcome import Outcome as CoreOutcome
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.report.table import refused_share
from forebay.sim.bounds import Size, limits_of, step_bound
from forebay.sim.records import COMPLETED
from forebay.sim.run import Outcome, Simulation, run
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec
from forebay.testing import EventWorld, ExponentialServers, poisson

Mode = Literal["backpressure", "admission", "hybrid"]
MODES: tuple[Mode, ...] = ("backpressure", "admission", "hybrid")
CONV, CODE, MLARGE = "azure_llm_2023_conv", "azure_llm_2023_code", "servegen_mlarge_1h_synth"
LEAVES = ClientSpec(patience_s=30.0)

Row = dict[str, Any]


def config(
    mode: Mode,
    *,
    limit: int = 64,
    tokens: int | None = None,
    ttft_ms: float = 1000,
    wait_budget_ms: float | None = None,
    depth: int | None = None,
    deadline_s: float = 30,
    batching: str | None = None,
    kind: str = "fixed",
    fair_share: bool = False,
    more: str = "",
) -> str:
    """A normal configuration; what is None keeps its default."""
    weighed = "" if tokens is None else f", tokens = {tokens}"
    bound = f'{{ kind = "{kind}", limit = {limit}{weighed} }}'
    lines = [
        f"[slo]\nttft_ms = {ttft_ms}",
        f'[admission]\nmode = "{mode}"',
        *([f"wait_budget_ms = {wait_budget_ms}"] if wait_budget_ms is not None else []),
        *(["fair_share = true"] if fair_share else []),
        f"[queue]\ndeadline_s = {deadline_s}",
        *([f"depth_limit = {depth}"] if depth is not None else []),
        f'[[engines]]\nname = "e"\nurls = ["http://127.0.0.1:8000"]\nconcurrency = {bound}',
        *([f"batching = {batching}"] if batching is not None else []),
        more,
    ]
    return "\n".join(lines) + "\n"


def simulate(
    name: str, text: str | None, engines: EngineSpec, workload: WorkloadSpec, clients: ClientSpec = LEAVES, **more: Any
) -> Outcome:
    """One run; without a config the requests go straight to the engines."""
    more.setdefault("ttft_ms", 1000.0)
    made = Scenario(
        name=name,
        policy=name,
        config=text or "",
        gateway=text is not None,
        engines=engines,
        workload=workload,
        clients=clients,
        **more,
    )
    return run(made)


def row(name: str, outcome: Outcome, **more: Any) -> Row:
    """The figures of a run that most claims are about."""
    result = outcome.result
    return {
        "run": name,
        **more,
        "ttft p50 ms": result.ttft_ms.p50,
        "ttft p99 ms": result.ttft_ms.p99,
        "latency p99 ms": result.latency_ms.p99,
        "served/s": result.served_per_s,
        "in time/s": result.goodput_per_s,
        "refused %": 100 * refused_share(result),
        "busy %": 100 * (result.utilization.busy or 0.0),
        "wasted %": 100 * result.wasted_work_ratio,
    }


def overload() -> list[Row]:
    """Chat at twice its recorded rate on one A100, which carries some 1.2 times that: who waits, who is refused."""
    engine, load = EngineSpec(profile=A100_8B), WorkloadSpec(trace=CONV, speed=2.0, duration_s=400)
    text = {mode: config(mode, limit=64) for mode in MODES}
    rows = [row(mode, simulate(mode, text[mode], engine, load)) for mode in MODES]
    return [row("no gateway", simulate("no gateway", None, engine, load)), *rows]


def first_token_only() -> list[Row]:
    """Azure's hour of code completion on an A100, which it loads to a third on average: bursts alone break it."""
    engine, load = EngineSpec(profile=A100_8B), WorkloadSpec(trace=CODE)
    plain = simulate("no gateway", None, engine, load)
    gated = simulate("hybrid", config("hybrid", limit=8), engine, load)
    return [row("no gateway", plain), row("hybrid, 8 places", gated)]


class Mix(NamedTuple):
    """Mean lengths, log-normal."""

    name: str
    prompt: int
    output: int

    def load(self, share: float, duration_s: float = 120.0) -> tuple[WorkloadSpec, float]:
        """Poisson arrivals at a share of what one H100 carries of this mix, and that in requests per second."""
        profile = language_model(H100_8B)
        limits = limits_of(profile, EngineSpec(profile=H100_8B))
        carried = step_bound(profile, limits, [Size(self.prompt, self.output)], tpot_ms=50).requests_per_s
        spec = WorkloadSpec(
            rate=share * carried,
            duration_s=duration_s,
            prompt_tokens=f"~{self.prompt}/1",
            output_tokens=f"~{self.output}/1",
        )
        return spec, carried


class _Senders(EventWorld):
    """Senders that send their next request when the last has ended."""

    def closed(self, ticket: Ticket) -> None:
        super().closed(ticket)
        self.at(self.now + 1, lambda: self.offer(Request(key="k", counted_tokens=100, generates=False)))


def bounded() -> list[Row]:
    """Backpressure with 64 places of a second each (exponential): senders of a fixed number, and ever new ones."""
    rows = []
    for senders in (32, 64, 96, 128, 256, None):
        pool = PoolConfig(name="p", engines=("e",), mode=CoreMode.BACKPRESSURE, limit=FixedConfig(limit=64))
        kind = EventWorld if senders is None else _Senders
        world = kind(PipelineConfig((pool,)), {"e": ExponentialServers(SECOND)}, seed=1)
        world.report(EngineUp("e"))
        instants = poisson(Random("bounded"), 64 * 1.2, 0, 300 * SECOND) if senders is None else range(senders)
        world.arrivals((at, Request(key="k", counted_tokens=100, generates=False)) for at in instants)
        world.run(300 * SECOND)
        served = [ticket for ticket in world.ended if ticket.outcome is CoreOutcome.COMPLETED]
        waits = sorted(ticket.queue_wait_ns / SECOND for ticket in served)
        rows.append({
            "senders": "unbounded, 1.2 times the capacity" if senders is None else senders,
            "wait p50 s": waits[len(waits) // 2],
            "wait p99 s": waits[int(0.99 * len(waits))],
            "served/s": len(waits) / 300,
        })  # fmt: skip
    return rows


MIXES = (Mix("chat", 553, 189), Mix("retrieval", 4113, 118), Mix("long answers", 292, 557))


def depth_or_wait() -> list[Row]:
    """Twice the capacity, three mixes: a queue of 20 whatever it is made of, against a wait budget of 200 ms."""
    rows = []
    for mix in MIXES:
        load, carried = mix.load(2.0)
        places = {"chat": 150, "retrieval": 24, "long answers": 150}[mix.name]
        gates = {
            "depth 20": config("hybrid", limit=places, depth=20, wait_budget_ms=20_000, ttft_ms=30_000),
            "wait 200 ms": config("hybrid", limit=places, depth=10_000, wait_budget_ms=200),
        }
        for name, text in gates.items():
            outcome = simulate(name, text, EngineSpec(profile=H100_8B), load, warm_up_s=20.0, tpot_ms=50.0)
            wait = outcome.result.queue_wait_ms
            shown = row(f"{mix.name}, {name}", outcome)
            rows.append({"carried/s": carried, "wait p50 ms": wait.p50, "wait p99 ms": wait.p99} | shown)
    return rows


BATCHES = '{ kind = "dynamic", max_size = 32, linger_ms = 0 }'
ENCODER_PEAK = 32_000 / encoder(BERT_INT8).batch_ms(32)


def encoder_load(share: float, arrivals: Literal["poisson", "bursty"] = "poisson", s: float = 3.0) -> WorkloadSpec:
    """Arrivals at a share of what one A100 makes of BERT-large INT8 in batches of 32."""
    return WorkloadSpec(
        rate=share * ENCODER_PEAK, duration_s=s, arrivals=arrivals, prompt_tokens="128", output_tokens="1"
    )


def wait_rule() -> list[Row]:
    """Refuse when the predicted wait exceeds 50 ms: the encoder, from a third of its capacity to three times that."""
    rows = []
    engine = EngineSpec(profile=BERT_INT8, max_num_seqs=32)
    for share in (0.3, 0.6, 0.9, 1.2, 2.0, 3.0):
        text = config("hybrid", limit=1, wait_budget_ms=50, depth=100_000, batching=BATCHES)
        result = simulate("50 ms", text, engine, encoder_load(share), latency_ms=100.0, ttft_ms=None).result
        rows.append({
            "load": share,
            "batch of 32 filled %": 100 * (result.utilization.batch or 0.0),
            "busy %": 100 * (result.utilization.busy or 0.0),
            "wait p99 ms": result.queue_wait_ms.p99,
            "latency p99 ms": result.latency_ms.p99,
            "late of admitted %": 100 * result.late_evicted_ratio,
            "refused %": 100 * refused_share(result),
        })  # fmt: skip
    return rows


def linger() -> list[Row]:
    """Waiting for a batch to fill: 0, 20 and 50 ms, at a third of the load and near the capacity."""
    rows = []
    engine = EngineSpec(profile=BERT_INT8, max_num_seqs=32)
    for share in (0.1, 0.3, 0.6, 0.9, 0.95):
        for linger_ms in (0, 20, 50):
            batches = f'{{ kind = "dynamic", max_size = 32, linger_ms = {linger_ms} }}'
            text = config("backpressure", limit=1, batching=batches)
            result = simulate("linger", text, engine, encoder_load(share), latency_ms=100.0, ttft_ms=None).result
            rows.append({
                "load": share,
                "linger ms": linger_ms,
                "latency p50 ms": result.latency_ms.p50,
                "latency p99 ms": result.latency_ms.p99,
                "batch of 32 filled %": 100 * (result.utilization.batch or 0.0),
                "busy %": 100 * (result.utilization.busy or 0.0),
                "in 100 ms %": 100 * result.goodput_per_s / (result.counts.offered / result.duration_s),
            })  # fmt: skip
    return rows


def depth_formula() -> list[Row]:
    """The depth that serves most within 100 ms, for batches of 32 on the encoder at 1.5 times its capacity."""
    rows = []
    engine = EngineSpec(profile=BERT_INT8, max_num_seqs=32)
    for depth in (4, 8, 16, 32, 40, 48, 64, 128, 256, 512):
        text = config("hybrid", limit=1, depth=depth, wait_budget_ms=20_000, ttft_ms=30_000, batching=BATCHES)
        load = encoder_load(1.5, "bursty", 5.0)
        result = simulate("depth", text, engine, load, latency_ms=100.0, ttft_ms=None).result
        rows.append({
            "depth": depth,
            "in 100 ms/s": result.goodput_per_s,
            "latency p99 ms": result.latency_ms.p99,
            "batch of 32 filled %": 100 * (result.utilization.batch or 0.0),
        })  # fmt: skip
    return rows


def natural_batches() -> list[Row]:
    """Batches without a queue: requests of a continuously batching engine join it as they come."""
    rows = []
    mix = MIXES[0]
    for share in (0.25, 0.5, 0.75):
        load, _ = mix.load(share)
        outcome = simulate("direct", None, EngineSpec(profile=H100_8B), load, warm_up_s=20.0)
        util = outcome.result.utilization
        rows.append({
            "load": share,
            "mean batch": 1024 * (util.batch or 0.0),
            "busy %": 100 * (util.busy or 0.0),
            "tokens, % of best": 100 * (outcome.extras.tokens_share or 0.0),
            "ttft p50 ms": outcome.result.ttft_ms.p50,
            "ttft p99 ms": outcome.result.ttft_ms.p99,
        })  # fmt: skip
    return rows


def engine_limits() -> list[Row]:
    """vLLM's own batch limits at 1.5 times the capacity: they bound the batch, and leave the queue as it is."""
    load, _ = MIXES[0].load(1.5)
    specs = {
        "max_num_seqs 1,024": EngineSpec(profile=H100_8B),
        "max_num_seqs 128": EngineSpec(profile=H100_8B, max_num_seqs=128),
        "max_num_batched_tokens 2,048": EngineSpec(profile=H100_8B, max_num_batched_tokens=2048),
    }
    rows = [row(name, simulate(name, None, spec, load, tpot_ms=50.0)) for name, spec in specs.items()]
    gates = {
        "hybrid, 150 places": config("hybrid", limit=150),
        "hybrid, guarded": config("hybrid", kind="guarded"),
    }
    for name, text in gates.items():
        rows.append(row(name, simulate(name, text, EngineSpec(profile=H100_8B), load, tpot_ms=50.0)))
    return rows


def token_admission() -> list[Row]:
    """Places counted in requests or in tokens, admission mode: the fewest refusals at each p99 of the first token."""
    rows = []
    for trace, profile, speed, targets in (
        (CODE, A100_8B, 1.0, (2000.0, 4000.0, 8000.0)),
        (CODE, H100_8B, 2.0, (1000.0, 2000.0, 4000.0)),
        (MLARGE, H100_8B, 1.6, (500.0, 1000.0, 2000.0)),
        (MLARGE, A100_8B, 0.8, (1000.0, 2000.0, 4000.0)),
    ):
        load = WorkloadSpec(trace=trace, speed=speed, duration_s=900)
        engine = EngineSpec(profile=profile)

        def tried(text: str, load: WorkloadSpec = load, engine: EngineSpec = engine) -> tuple[float, float]:
            result = simulate("limit", text, engine, load, LEAVES).result
            return result.ttft_ms.p99 or 0.0, refused_share(result)

        in_requests = [
            tried(config("admission", limit=limit)) for limit in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
        ]
        in_tokens = [
            tried(config("admission", limit=4096, tokens=1000 * tokens))
            for tokens in (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
        ]
        for target in targets:
            counted = _fewest(in_requests, target)
            weighed = _fewest(in_tokens, target)
            if counted is None or weighed is None:
                continue
            rows.append({
                "trace": trace,
                "engine": profile.split("/")[0],
                "speed": speed,
                "ttft p99 within ms": target,
                "refused, by requests %": 100 * counted,
                "refused, by tokens %": 100 * weighed,
                "fewer %": 100 * (1 - weighed / counted) if counted else 0.0,
            })  # fmt: skip
    return rows


def _fewest(tried: Iterable[tuple[float, float]], target: float) -> float | None:
    return min((refused for p99, refused in tried if p99 <= target), default=None)


def bursts() -> list[Row]:
    """Admission alone against the hybrid, in bursts whose mean is below the capacity: what a short wait saves."""
    rows = []
    mix = MIXES[0]
    for share in (0.6, 1.0):
        load, _ = mix.load(share)
        load = _bursty(load)
        modes: tuple[Mode, ...] = ("admission", "hybrid")
        for mode in modes:
            text = config(mode, limit=150)
            outcome = simulate(mode, text, EngineSpec(profile=H100_8B), load, tpot_ms=50.0)
            rows.append(row(f"language model, {mode}", outcome, load=share))
        for (places, what), mode in product(((32, "one batch"), (64, "two batches")), modes):
            # An engine that batches what it is given: one batch in it, or one more that waits inside.
            text = config(mode, limit=places, wait_budget_ms=25)
            engine = EngineSpec(profile=BERT_INT8, max_num_seqs=32, joins=True)
            load_e = encoder_load(share, "bursty", 10.0)
            outcome = simulate(mode, text, engine, load_e, latency_ms=100.0, ttft_ms=None)
            rows.append(row(f"encoder, {what}, {mode}", outcome, load=share))
    return rows


def _bursty(load: WorkloadSpec) -> WorkloadSpec:
    return WorkloadSpec(
        rate=load.rate,
        duration_s=load.duration_s,
        arrivals="bursty",
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
    )


def retries() -> list[Row]:
    """Ten times the load for ten seconds, on a base of 70 %: callers who come back at once, and as the SDK does."""
    rows = []
    with spike_trace() as path:
        load = WorkloadSpec(trace=str(path))
        for name, clients in {
            "official SDK": ClientSpec(retry="sdk", patience_s=120.0),
            "at once, up to 5 times": ClientSpec(retry="naive", patience_s=120.0),
            "never": ClientSpec(patience_s=120.0),
        }.items():
            text = config("hybrid", limit=150)
            result = simulate(name, text, EngineSpec(profile=H100_8B), load, clients).result
            rows.append({
                "callers": name,
                "attempts per request": result.attempts_per_request,
                "completed %": 100 * result.counts.completed / result.counts.offered,
                "in time/s": result.goodput_per_s,
                "ttft p99 ms": result.ttft_ms.p99,
            })  # fmt: skip
    return rows


@contextmanager
def spike_trace() -> Iterator[Path]:
    """Chat at 70 % of an H100 for two minutes, ten times that from the 40th to the 50th second."""
    _, carried = MIXES[0].load(1.0)
    chance, at, lines = Random("spike"), 0.0, []
    while at < 120:
        at += chance.expovariate(0.7 * carried * (10 if 40 <= at < 50 else 1))
        lines.append((f"{at:.6f}", *_sizes(chance, MIXES[0]), ""))
    with _written(lines) as path:
        yield path


def bad_client() -> list[Row]:
    """Nine keys with a twentieth of the capacity each, and one that sends four times all of it."""
    rows = []
    _, carried = MIXES[0].load(1.0)
    chance, lines = Random("flood"), []
    for number in range(10):
        at, rate = 0.0, carried * (4.0 if number == 0 else 0.05)
        while at < 90:
            at += chance.expovariate(rate)
            lines.append((f"{at:.6f}", *_sizes(chance, MIXES[0]), f"k{number}"))
    lines.sort(key=lambda line: float(line[0]))
    share = round(carried * (553 + 189) * 0.2)
    keys = "\n".join(
        f'[[keys.static]]\nid = "k{number}"\nsecret = "sk-{number}"\nlimits = {{ tokens_per_second = {share} }}'
        for number in range(10)
    )
    with _written(lines) as path:
        for name, text in {
            "no limits": config("hybrid", limit=150),
            "an envelope of a fifth of the capacity each": config("hybrid", limit=150, more=keys),
            "a fair share, no envelopes": config("hybrid", limit=150, fair_share=True),
        }.items():
            made = Scenario(
                name=name,
                policy=name,
                config=text,
                engines=EngineSpec(profile=H100_8B),
                workload=WorkloadSpec(trace=str(path)),
                clients=LEAVES,
                ttft_ms=1000.0,
            )
            rows.append({"limits": name, **_by_key(made)})
    return rows


def _by_key(made: Scenario) -> Row:
    simulation = Simulation(made)
    simulation.run()
    records = simulation.records
    tally: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}
    for key, outcome in zip(records.key, records.outcome, strict=True):
        of = tally[records.keys[key] == "k0"]
        of[0] += 1
        of[1] += outcome == COMPLETED
    result = simulation.outcome().result
    return {
        "well-behaved completed %": 100 * tally[False][1] / tally[False][0],
        "flooding completed %": 100 * tally[True][1] / tally[True][0],
        "refused, by reason": result.shed_by_reason,
        "in time/s": result.goodput_per_s,
    }


def cold_start() -> list[Row]:
    """An engine that is not there for 30 s, chat at 60 %: who gets an answer, when callers are patient and when not."""
    rows = []
    load, _ = MIXES[0].load(0.6, 90.0)
    engine = EngineSpec(profile=H100_8B, faults=(FaultSpec(kind="cold", to_s=30.0),))
    for patience in (8.0, 60.0):
        for mode in MODES:
            clients = ClientSpec(retry="sdk", patience_s=patience)
            result = simulate(mode, config(mode, limit=150), engine, load, clients).result
            rows.append({
                "patience s": patience,
                "mode": mode,
                "completed %": 100 * result.counts.completed / result.counts.offered,
                "left %": 100 * result.counts.cancelled / result.counts.offered,
                "refused %": 100 * refused_share(result),
                "latency p99 ms": result.latency_ms.p99,
            })  # fmt: skip
    return rows


def fleet() -> list[Row]:
    """The fewest A100s for the chat hour at four times its rate: all in time, or nearly all and the rest refused."""
    rows: list[Row] = []
    load = WorkloadSpec(trace=CONV, speed=4.0, duration_s=600)
    for count in range(3, 8):
        engine = EngineSpec(profile=A100_8B, count=count)
        for mode in ("backpressure", "hybrid"):
            result = simulate(mode, config(mode, limit=64), engine, load, LEAVES, warm_up_s=30.0).result
            rows.append({
                "GPUs": count,
                "mode": mode,
                "in time %": 100 * result.goodput_per_s / (result.counts.offered / result.duration_s),
                "refused %": 100 * refused_share(result),
                "ttft p99 ms": result.ttft_ms.p99,
            })  # fmt: skip
    return rows


def _sizes(chance: Random, mix: Mix) -> tuple[int, int]:
    sigma = 0.8326  # of a log-normal with a coefficient of variation of 1
    return tuple(
        max(1, round(mean * chance.lognormvariate(-sigma * sigma / 2, sigma))) for mean in (mix.prompt, mix.output)
    )  # type: ignore[return-value]


@contextmanager
def _written(lines: Iterable[tuple[Any, ...]]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow(("arrival_s", "prompt_tokens", "output_tokens", "key_id"))
            out.writerows(lines)
        yield path
