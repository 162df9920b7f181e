"""Everything that may be configured: types, ranges, defaults, and the reason of each field.

The descriptions here are the documentation: `forebay config show` and docs/configuration.md are made from them.
Units are in the names. Sections and fields in LATER belong to capabilities that this version does not have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from forebay.config.admission import Admission
from forebay.config.concurrency import Concurrency
from forebay.config.fields import DAY_S, Amount, Count, Milliseconds, ModelName, Name, Seconds, Section, Text
from forebay.config.ledger import Ledger
from forebay.config.ports import Admin, Responses, Server, Tls
from forebay.config.secret import Secret
from forebay.config.shadow import ClassShadow, EngineShadow, QueueShadow
from forebay.config.tuner import Tuner
from forebay.core.model import Mode


class Slo(Section, frozen=True):
    """The objective. What may wait, and for how long, derives from it."""

    ttft_ms: Annotated[Milliseconds, Meta(description="Time to first token that callers expect, in ms.")] = 1000
    tpot_ms: Annotated[
        Milliseconds, Meta(description="Time per output token that callers expect, in ms; a guarded limit keeps it.")
    ] = 50
    latency_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="Time that callers expect of answers without tokens (embeddings, scores, images), in ms; a "
            "guarded limit keeps it. Unset: ttft_ms, since such an answer is its own first token.",
            examples=[200],
        ),
    ] = None


class Queue(Section, frozen=True):
    """The waiting room of each engine entry, bounded in every direction."""

    depth_limit: Annotated[
        Amount | None,
        Meta(
            description="Requests that may wait in hybrid mode; the wait budget usually bites first. Unset: as [tuner] "
            "finds.",
            examples=[256],
        ),
    ] = None
    held_limit: Annotated[
        Count, Meta(description="Requests that may be held in backpressure mode: a bound on memory, not on waiting.")
    ] = 10_000
    tokens_limit: Annotated[Count, Meta(description="Expected tokens, in and out, that may wait.")] = 4_000_000
    bytes_limit: Annotated[Count, Meta(description="Bytes of request bodies that may wait.")] = 256 * 1024 * 1024
    deadline_s: Annotated[
        Seconds, Meta(description="Longest that a request is held in backpressure mode, in seconds.")
    ] = 30
    order: Annotated[
        Literal["earliest", "adaptive"],
        Meta(
            description="Order among the requests of one key. earliest: whose time is up first, which is by arrival "
            "where all wait as long. adaptive: the newest first while the oldest has waited for more than a quarter "
            "of its time, for budgets and holds of seconds."
        ),
    ] = "earliest"
    shadow: QueueShadow = QueueShadow()


class Batching(Section, frozen=True):
    """Grouping before dispatch, for engines that run one batch at a time."""

    kind: Annotated[
        Literal["passthrough", "dynamic"],
        Meta(description="passthrough suits engines that batch by themselves (vLLM, SGLang); dynamic forms batches."),
    ] = "passthrough"
    max_size: Annotated[Count, Meta(description="Requests in one batch (dynamic).")] = 32
    linger_ms: Annotated[
        Annotated[float, Meta(ge=0, le=60_000)],
        Meta(description="Longest that a batch waits to fill, in ms (dynamic); 0 leaves when the engine is free."),
    ] = 0
    max_tokens: Annotated[
        Count | None,
        Meta(description="Expected tokens in one batch (dynamic). Unset: no bound.", examples=[16384]),
    ] = None


class ModelLimits(Section, frozen=True):
    """Limits that apply to one model. What is unset is unlimited; 0 allows nothing."""

    requests_per_minute: Annotated[
        Amount | None, Meta(description="Requests per minute, all of which may come at once.", examples=[600])
    ] = None
    tokens_per_minute: Annotated[
        Amount | None, Meta(description="Tokens per minute, in and out together.", examples=[100_000])
    ] = None
    tokens_per_second: Annotated[
        Amount | None, Meta(description="Tokens per second: the key's envelope.", examples=[5000])
    ] = None
    burst_s: Annotated[Seconds, Meta(description="Seconds of the envelope that may be spent at once.")] = 2.0
    concurrency: Annotated[
        Amount | None, Meta(description="Requests that may be queued or in flight at once.", examples=[8])
    ] = None
    input_tokens_per_minute: Annotated[
        Amount | None, Meta(description="Prompt tokens per minute.", examples=[80_000])
    ] = None
    output_tokens_per_minute: Annotated[
        Amount | None, Meta(description="Generated tokens per minute.", examples=[20_000])
    ] = None
    weighted_tokens_per_minute: Annotated[
        Amount | None,
        Meta(
            description="Prompt tokens and twice the generated ones per minute: about the work of an engine.",
            examples=[120_000],
        ),
    ] = None
    tokens_per_day: Annotated[
        Amount | None, Meta(description="Tokens of a calendar day of UTC, in and out together.", examples=[5_000_000])
    ] = None
    tokens_per_month: Annotated[
        Amount | None,
        Meta(description="Tokens of a calendar month of UTC, in and out together.", examples=[100_000_000]),
    ] = None


class Limits(ModelLimits, frozen=True):
    """Limits of one key, or of keys that share them. What is unset is unlimited; 0 allows nothing."""

    models: Annotated[
        dict[ModelName, ModelLimits],
        Meta(
            description="Further limits, each of one model by its name; they count beside those for all models.",
            examples=[{"llama-70b": {"tokens_per_minute": 20_000}}],
        ),
    ] = {}


class LimitSets(Section, frozen=True):
    """Limits that belong to no single key."""

    default: Annotated[
        Limits, Meta(description="Of all callers without a key together, and of each stored key without its own.")
    ] = Limits()
    all: Annotated[Limits, Meta(description="Of everybody together, beside all other limits.")] = Limits()


class Team(Section, frozen=True):
    """Keys that share limits, beside their own."""

    limits: Annotated[Limits, Meta(description="Of all its keys together.")] = Limits()


class PriorityClass(Section, frozen=True):
    """A class that keys may belong to. The class `default` always exists."""

    priority: Annotated[Annotated[int, Meta(ge=-100, le=100)], Meta(description="Higher goes first.", examples=[1])] = 0
    mode: Annotated[
        Mode | None,
        Meta(
            description="Mode of its requests. Unset: the route's or the gateway's.",
            examples=["hybrid"],
        ),
    ] = None
    weight: Annotated[
        Annotated[float, Meta(gt=0, le=1000)],
        Meta(description="Of each of its keys in the fair share, beside keys of other classes."),
    ] = 1.0
    hold_back: Annotated[
        Annotated[float, Meta(ge=0, le=0.9)],
        Meta(description="Share of the engines' places that it leaves free for the classes above it.", examples=[0.1]),
    ] = 0.0
    names_flows: Annotated[
        bool,
        Meta(
            description="Let its keys name the flow that a request belongs to (x-llm-d-inference-fairness-id), as one "
            "key of a platform with many users does. Each flow has a fair share of its own: for trusted keys only."
        ),
    ] = False
    limits: Annotated[Limits, Meta(description="Of all its keys together, beside their own.")] = Limits()
    floor_share: Annotated[
        Annotated[float, Meta(ge=0, le=0.5)] | None,
        Meta(
            description="Part of the turns that its priority keeps, however much comes above it. Unset: 0.02, and "
            "nothing for the lowest priority, which is what is shed.",
            examples=[0.05],
        ),
    ] = None
    ttft_ms: Annotated[
        Milliseconds | None,
        Meta(description="Its own objective for the first token, in ms. Unset: that of [slo].", examples=[500]),
    ] = None
    tpot_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="Its own objective per output token, in ms. One batch serves all classes, so the shortest of "
            "all classes and [slo] is kept.",
            examples=[30],
        ),
    ] = None
    latency_ms: Annotated[
        Milliseconds | None,
        Meta(description="Its own objective for answers without tokens, in ms; the shortest is kept.", examples=[100]),
    ] = None
    shadow: ClassShadow = ClassShadow()


class Timeouts(Section, frozen=True):
    """How long an engine may keep us waiting, in seconds."""

    connect_s: Annotated[Seconds, Meta(description="To accept a connection.")] = 5
    first_byte_s: Annotated[
        Seconds, Meta(description="To begin its answer; a long answer that is not streamed begins when it is done.")
    ] = 600
    idle_s: Annotated[Seconds, Meta(description="Between two pieces of one answer.")] = 120


class Probe(Section, frozen=True):
    """How readiness is asked for."""

    path: Annotated[
        Annotated[str, Meta(pattern=r"^/[!-~]*$")],
        Meta(
            description="Answers 200 when the engine is ready (vLLM, SGLang, TGI, llama.cpp: /health; Ollama: /). "
            "An engine without /health is asked for /v1/models."
        ),
    ] = "/health"
    interval_s: Annotated[Seconds, Meta(description="Between two probes, in seconds.")] = 1
    timeout_s: Annotated[Seconds, Meta(description="Time for an answer, in seconds.")] = 2


class EngineTls(Section, frozen=True):
    """TLS towards an engine with an https URL."""

    verify: Annotated[bool, Meta(description="Check the engine's certificate.")] = True
    ca: Annotated[
        Text | None, Meta(description="PEM file of trusted authorities. Unset: the system's.", examples=["ca.pem"])
    ] = None


class Engine(Section, frozen=True):
    """Interchangeable engines with one queue in front. The first entry that serves a model gets its requests."""

    name: Annotated[Name, Meta(description="Unique; shown in metrics and logs.", examples=["llama"])]
    kind: Annotated[
        Literal["openai", "embedded", "simulated", "kserve", "function"],
        Meta(
            description="openai: any OpenAI-style HTTP server; embedded: the bundled model; simulated: a simulated "
            "GPU. kserve and function are not in this version."
        ),
    ] = "openai"
    urls: Annotated[
        tuple[Text, ...],
        Meta(
            description="One base URL per engine, without /v1. Without any, embedded and simulated ones are started.",
            examples=[["http://127.0.0.1:8000"]],
        ),
    ] = ()
    models: Annotated[tuple[Text, ...], Meta(description="Names of the models it serves; * is any.", min_length=1)] = (
        "*",
    )
    api_key: Annotated[
        Secret | None,
        Meta(
            description="The engine's own credential, sent as a bearer token; may be env:NAME or file:PATH.",
            examples=["env:ENGINE_API_KEY"],
        ),
    ] = None
    forward_key: Annotated[bool, Meta(description="Send the caller's credential on, when api_key is unset.")] = False
    concurrency: Annotated[Concurrency, Meta(description="Most that may be in flight.")] = Concurrency()
    balance: Annotated[
        Literal["least", "p2c", "affinity", "random"],
        Meta(
            description="Which of its URLs gets a request. least: the one with the least outstanding work. p2c: the "
            "better of two drawn by chance, where least is not trusted. affinity: the one that has the "
            "beginning of the prompt in its cache, while it is not much busier. random: to compare with."
        ),
    ] = "least"
    prefix_bytes: Annotated[
        Annotated[int, Meta(ge=64, le=65_536)],
        Meta(description="How much of a body counts as the beginning (affinity); shorter bodies have none."),
    ] = 1024
    shadow: EngineShadow = EngineShadow()
    slow_start_s: Annotated[
        Annotated[float, Meta(ge=0, le=DAY_S)],
        Meta(
            description="An engine that was away has its whole limit again after this long, in seconds, or as soon as "
            "enough of its answers have begun; 0: at once."
        ),
    ] = 10
    timeouts: Annotated[Timeouts, Meta(description="Bounds on its silence.")] = Timeouts()
    probe: Annotated[Probe, Meta(description="Readiness.")] = Probe()
    metrics_path: Annotated[
        Annotated[str, Meta(pattern=r"^(/[!-~]*)?$")],
        Meta(
            description="Where the engine tells Prometheus of itself (vLLM, SGLang, TensorRT-LLM, Triton): a guarded "
            "limit reads the size of its cache, preemptions and its own queue there, and several URLs are compared by "
            "what others have sent to them. Empty: it is not read."
        ),
    ] = "/metrics"
    metrics_port: Annotated[
        Annotated[int, Meta(ge=1, le=65_535)] | None,
        Meta(description="Port of that page. Unset: the engine's own.", examples=[8002]),
    ] = None
    gpus: Annotated[
        tuple[tuple[Text, ...], ...],
        Meta(
            description="For each URL, the GPUs that it runs on, by number or UUID; [gpu] says where they are read.",
            examples=[[["0", "1"]]],
        ),
    ] = ()
    tls: Annotated[EngineTls, Meta(description="For https URLs.")] = EngineTls()
    batching: Annotated[Batching | None, Meta(description="Its own batching. Unset: the gateway's.")] = None


class Route(Section, frozen=True):
    """A path beyond the built-in ones, or other settings for one of those."""

    path: Annotated[
        Annotated[str, Meta(pattern=r"^/[!$-)+->@-~]*$")],
        Meta(description="An exact path, without a query.", examples=["/v1/custom"]),
    ]
    kind: Annotated[
        Literal["gated", "control"],
        Meta(description="gated requests pass all rooms; control ones are passed on, keyed but never queued."),
    ] = "gated"
    engine: Annotated[
        Name | None, Meta(description="Engine entry that serves it. Unset: by model.", examples=["llama"])
    ] = None
    mode: Annotated[
        Mode | None, Meta(description="Mode of its requests. Unset: the gateway's.", examples=["hybrid"])
    ] = None


class StaticKey(Section, frozen=True, rename={"class_": "class"}):
    """An API key. It may be given in the file, or referred to."""

    id: Annotated[Name, Meta(description="Unique; shown in logs instead of the secret.", examples=["team-a"])]
    secret: Annotated[
        Secret,
        Meta(description="What callers send; may be env:NAME or file:PATH.", examples=["env:TEAM_A_KEY"]),
    ]
    class_: Annotated[Name, Meta(description="One of [classes], or default.")] = "default"
    team: Annotated[
        Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")],
        Meta(description="One of [teams], whose limits it shares. Empty: none.", examples=["ops"]),
    ] = ""
    models: Annotated[tuple[Text, ...], Meta(description="Models it may use; * is any.", min_length=1)] = ("*",)
    routes: Annotated[
        tuple[Text, ...],
        Meta(description="Routes it may use, by name or by the path of [[routes]]; * is any.", min_length=1),
    ] = ("*",)
    mode: Annotated[Mode | None, Meta(description="Mode of its requests. Unset: its class's.", examples=["hybrid"])] = (
        None
    )
    limits: Annotated[Limits, Meta(description="Its own allowance.")] = Limits()
    cap_output_tokens: Annotated[
        Count | None,
        Meta(description="Largest max_tokens of its requests, as in [estimate]. Unset: that one.", examples=[1024]),
    ] = None


class Keys(Section, frozen=True):
    """Who may call."""

    anonymous: Annotated[bool, Meta(description="Serve callers without a key, within [limits.default].")] = True
    store: Annotated[
        Text | None,
        Meta(
            description="Database of the keys that `forebay keys` makes, of their use and their credit: SQLite, or "
            "PostgreSQL as postgresql://USER@HOST/NAME. Unset: only static keys, and nothing is kept.",
            examples=["sqlite:///forebay.db"],
        ),
    ] = None
    at_start: Annotated[
        Literal["wait", "stop"],
        Meta(
            description="When the store is not there at the start. wait: the gateway serves callers without a key and "
            "static keys, refuses keys of the store (503 store_away) and is not ready until the store is there; stop: "
            "it ends with an error, as it does for a store that can never be used."
        ),
    ] = "wait"
    static: Annotated[tuple[StaticKey, ...], Meta(description="Keys of this file.")] = ()


class Estimate(Section, frozen=True):
    """What a request costs before anything was learned about its like."""

    output_tokens_default: Annotated[
        Count, Meta(description="Output tokens expected of, and reserved for, a request without max_tokens.")
    ] = 256
    cap_output_tokens: Annotated[
        Count | None,
        Meta(
            description="Largest max_tokens that an engine is asked for: a request with more, or without any, is sent "
            "on with this. Unset: bodies are not touched.",
            examples=[4096],
        ),
    ] = None
    message_overhead_tokens: Annotated[Amount, Meta(description="Tokens of a chat template around the text.")] = 8
    tokenizers: Annotated[
        dict[Text, Literal["o200k", "cl100k", "llama3", "qwen3"]],
        Meta(
            description='Count prompts of up to 32 KiB with a real tokenizer, by model ("*": all others), instead of '
            "pricing their bytes. Needs `pip install 'forebay[tokenizers]'`; without it they are priced all the same.",
            examples=[{"llama-70b": "llama3"}],
        ),
    ] = {}
    cached_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="What a prompt token that the engine had in its prefix cache counts of a key's tokens: 1 all, "
            "0 nothing. It is charged in full until the engine's answer says so.",
        ),
    ] = 1.0


class Gpu(Section, frozen=True):
    """The memory of the engines' GPUs: an engine on a full one is given less. Their utilisation is shown only.

    Engines that take their memory at the start (vLLM: `--gpu-memory-utilization`) are always as full as they were told
    to be: set `memory_high` above that.
    """

    source: Annotated[
        Literal["none", "nvml", "dcgm"],
        Meta(
            description="nvml: the GPUs of this machine (needs `pip install 'forebay[gpu]'` and NVIDIA's driver). "
            "dcgm: NVIDIA's DCGM exporter, here or elsewhere."
        ),
    ] = "none"
    urls: Annotated[
        tuple[Text, ...],
        Meta(description="Pages of the DCGM exporters (dcgm).", examples=[["http://127.0.0.1:9400/metrics"]]),
    ] = ()
    memory_high: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(description="Used share of a GPU's memory from which on its engine's window is lowered."),
    ] = 0.97
    interval_s: Annotated[Seconds, Meta(description="Between two readings, in seconds.")] = 1


class Telemetry(Section, frozen=True):
    """What is written down."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity of log lines on stderr.")
    ] = "info"
    access_log: Annotated[
        bool, Meta(description="Write one JSON line per request: outcome, reason, limit and figures; no prompts.")
    ] = False
    access_log_path: Annotated[
        Text | None,
        Meta(description="File to append the access log to. Unset: stdout.", examples=["access.jsonl"]),
    ] = None
    explain: Annotated[
        Amount,
        Meta(
            description="Requests that were refused, evicted or failed, or whose caller left: the last so many, which "
            "the admin port can explain."
        ),
    ] = 1000
    explain_completed: Annotated[
        bool,
        Meta(
            description="Keep those that were answered too, and of each that was let in the figures that it was let in "
            "by; costs a few per cent of the gateway's CPU."
        ),
    ] = False
    record_path: Annotated[
        Text | None,
        Meta(
            description="File to append the record of sizes and times to, a trace for the simulator; no prompts. "
            "Unset: none is kept.",
            examples=["record.csv"],
        ),
    ] = None


class Config(Section, frozen=True):
    """The whole configuration."""

    server: Server = Server()
    admin: Admin = Admin()
    tls: Tls = Tls()
    responses: Responses = Responses()
    slo: Slo = Slo()
    admission: Admission = Admission()
    queue: Queue = Queue()
    tuner: Tuner = Tuner()
    batching: Batching = Batching()
    estimate: Estimate = Estimate()
    limits: LimitSets = LimitSets()
    classes: dict[Name, PriorityClass] = {}
    teams: dict[Name, Team] = {}
    engines: tuple[Engine, ...] = ()
    routes: tuple[Route, ...] = ()
    keys: Keys = Keys()
    ledger: Ledger = Ledger()
    telemetry: Telemetry = Telemetry()
    grpc: dict[str, Any] | None = None
    shared: dict[str, Any] | None = None
    gpu: Gpu = Gpu()


LATER = (("grpc",), ("shared",))
"""Accepted, so that a file written for a later version stays valid; without effect, which is said as a warning."""

ROUTE_NAMES = frozenset({
    "chat", "completions", "responses", "messages", "embeddings", "rerank", "score", "classify", "pooling", "audio",
    "infer", "models", "tokenize", "detokenize", "kserve_meta",
})  # fmt: skip
"""Built-in routes as keys may be limited to them; the data port's table of paths uses these names."""

ANONYMOUS = "anonymous"
"""Key id of callers without a key."""


DEPTH_BEGINS, NARROW_DEPTH_BEGINS = 256, 16
"""Where the depth begins: where it only bounds memory, and where it is to bound the wait by itself."""


def tuner_kind(config: Config) -> Literal["derived", "stepwise", "fixed"]:
    """What tunes the depth: nothing, once it is set."""
    return config.tuner.kind if config.queue.depth_limit is None else "fixed"


def depth_limit(config: Config) -> int:
    """The depth that was set, or where its tuner begins."""
    set_to, tuner = config.queue.depth_limit, config.tuner
    narrow = tuner.kind == "stepwise" or (tuner.kind == "derived" and tuner.wait_ms is not None)
    return (NARROW_DEPTH_BEGINS if narrow else DEPTH_BEGINS) if set_to is None else set_to


def wait_budget_ms(config: Config, ttft_ms: float | None = None) -> float:
    """The wait budget that was set, or the one that derives from the objective; `ttft_ms` is that of a class."""
    set_to = config.admission.wait_budget_ms
    return min(50.0, 0.1 * (ttft_ms or config.slo.ttft_ms)) if set_to is None else set_to
