"""The embedded engine as the HTTP server sees it: jobs in, tokens out, one worker thread that steps the model.

Two threads, each with state of its own. The event loop's thread tokenizes a job, keeps its sink and posts a command;
the worker thread owns the scheduler and the model, takes the commands between steps, and hands each step's results
back in one call. Nothing is locked but the inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final, TypeVarTuple, Unpack

from forebay.engines.embedded.gguf import GgufFile
from forebay.engines.embedded.model import Model, Shape, load_weights
from forebay.engines.embedded.sampling import choose
from forebay.engines.embedded.scheduler import Event, Finished, Scheduler, Sequence, Shown, Span, Want
from forebay.engines.embedded.tokenizer import Detokenizer, PromptError, PromptTooLongError, Tokenizer
from forebay.engines.serving.metrics import EngineMetrics
from forebay.engines.serving.stop import StopMatcher
from forebay.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forebay.engines.serving.engine import Job, JobKind, Sink

MODEL_ID: Final = "smollm2-135m-instruct"

_log = logging.getLogger(__name__)

Command = tuple[str, Sequence | str]

Args = TypeVarTuple("Args")


class _Text:
    """A sequence's text: whole characters only, stop strings never shown."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    def push(self, token: int) -> tuple[str, bool]:
        return self._matcher.feed(self._detokenizer.push(token))

    def flush(self) -> str:
        shown, stopped = self._matcher.feed(self._detokenizer.flush())
        return shown if stopped else shown + self._matcher.flush()


class _Inbox:
    """Commands to the worker. The one place that both threads touch."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._commands: deque[Command] = deque()

    def post(self, command: Command) -> None:
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def take(self, *, wait: bool) -> list[Command]:
        """All commands so far; with `wait`, at least one."""
        with self._arrived:
            while wait and not self._commands:
                self._arrived.wait()
            taken = list(self._commands)
            self._commands.clear()
            return taken


@dataclass(slots=True)
class _Live:
    """A job in the engine, as the event loop's thread knows it. Times are of the monotonic clock, in seconds."""

    sink: Sink
    sequence: Sequence
    arrived_s: float
    last_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Report:
    """What the worker tells after a step: its results, and its counts since the start."""

    events: list[Event] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    """Ids of the jobs that got their slot for this step."""
    batch: int = 0
    """Sequences in the step; 0 when there was none."""
    began_s: float = 0.0
    took_s: float = 0.0
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class EmbeddedEngine:
    """Serves one GGUF model; implements `ServedEngine`.

    Args:
        path: the GGUF file.
        slots: sequences that run at once.
        context: most tokens of a sequence, prompt and answer together.
        threads: CPU threads the model may use.
        max_waiting: most jobs that wait for a slot; beyond it a job is refused with 503.
    """

    kinds: frozenset[JobKind] = frozenset({"chat", "completion", "embedding"})

    def __init__(
        self, path: Path, *, slots: int, context: int, threads: int, max_waiting: int = 1024, model_id: str = MODEL_ID
    ) -> None:
        self.model_id = model_id
        self.max_model_len = context
        self._path = path
        self._threads = threads
        self._limit = slots + max_waiting
        self._scheduler = Scheduler(slots, context, max_waiting=self._limit)
        self._inbox = _Inbox()
        self._metrics = EngineMetrics(model_id)
        self._report = _Report()
        self._live: dict[str, _Live] = {}
        self._tokenizer: Tokenizer | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = False
        self._failure: str | None = None

    # ---- the event loop's thread

    async def start(self) -> None:
        """Checks the file and starts loading in the worker thread; `ready` turns true when that is done.

        Raises:
            EngineError: the file is no model that this engine runs.
        """
        self._loop = asyncio.get_running_loop()
        file = GgufFile(self._path)
        try:
            shape = Shape.from_gguf(file.metadata)
            if self.max_model_len > shape.trained_context:
                raise EngineError(
                    f"context {self.max_model_len} is more than this model's {shape.trained_context} tokens; "
                    "ask for less"
                )
        except BaseException:
            file.close()
            raise
        self._thread = threading.Thread(
            target=self._work, args=(file, shape), name="forebay-embedded-engine", daemon=True
        )
        self._thread.start()

    async def stop(self) -> None:
        """Ends the worker after the step it is in; jobs still running are dropped."""
        self._ready = False
        self._live.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.post(("stop", ""))
            await asyncio.to_thread(thread.join)

    def ready(self) -> bool:
        return self._ready

    def submit(self, job: Job, sink: Sink) -> None:
        if not self._ready or self._tokenizer is None:
            why = self._failure or "the model is still loading"
            sink.error(503, f"The engine is not ready: {why}.", "service_unavailable_error", "warming_up")
            return
        if len(self._live) >= self._limit:
            sink.error(
                503, f"The engine already holds {self._limit} requests; try later.", "overloaded_error", "queue_full"
            )
            return
        try:
            sequence = self._sequence(job, self._tokenizer)
        except PromptTooLongError:
            sink.error(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens, and the prompt does not leave "
                "room for an answer. Please reduce the length of the prompt.",
                "invalid_request_error",
                "context_length_exceeded",
            )
            return
        except PromptError as error:
            sink.error(400, str(error), "invalid_request_error", "invalid_prompt")
            return
        self._live[job.id] = _Live(sink, sequence, time.monotonic())
        self._inbox.post(("add", sequence))

    def abort(self, job_id: str) -> None:
        if self._live.pop(job_id, None) is not None:
            self._metrics.finished["abort"] += 1
            self._inbox.post(("abort", job_id))

    def metrics(self) -> str:
        report, metrics = self._report, self._metrics
        metrics.prompt_tokens = report.prompt_tokens
        metrics.generation_tokens = report.generated_tokens
        return metrics.text(
            running=report.running,
            # Jobs that the worker has not seen yet wait as well.
            waiting=max(report.waiting, len(self._live) - report.running),
            kv_usage=report.cache_usage,
            max_batch=self._scheduler.slots,
            cache_config={"block_size": "1", "num_gpu_blocks": str(self._scheduler.slots * self.max_model_len)},
        )

    def _sequence(self, job: Job, tokenizer: Tokenizer) -> Sequence:
        generates = job.kind != "embedding"
        # An answer needs at least one position beside the prompt's.
        limit = self.max_model_len - (1 if generates else 0)
        if job.messages is not None:
            prompt = tokenizer.encode_chat(job.messages, limit)
        elif isinstance(job.prompt, list):
            prompt = _checked_ids(job.prompt, tokenizer, limit)
        else:
            prompt = tokenizer.encode(job.prompt or "", limit)
        if not prompt:
            # What stands before every document in training: the model begins one of its own.
            prompt = [tokenizer.control_id("<|endoftext|>")]
        room = self.max_model_len - len(prompt)
        return Sequence(
            id=job.id,
            prompt=prompt,
            max_new=(room if job.max_tokens is None else max(1, min(job.max_tokens, room))) if generates else 0,
            text=_Text(tokenizer, job.stop) if generates else None,
            eos=() if job.ignore_eos else tokenizer.eos,
            draw=(job.temperature, Random(job.seed)) if job.temperature > 0 else None,
        )

    def _deliver(self, report: _Report) -> None:
        """Hands a step's results to the sinks; those of jobs that have left go nowhere."""
        now = time.monotonic()
        metrics = self._metrics
        self._report = report
        if report.batch:
            metrics.stepped(report.took_s, report.batch)
        for job_id in report.admitted:
            if (live := self._live.get(job_id)) is not None:
                metrics.queue_s.observe(max(0.0, report.began_s - live.arrived_s))
        for event in report.events:
            live = self._live.get(event.id)
            if live is None:
                continue
            if isinstance(event, Shown):
                if live.last_token_s:
                    metrics.itl_s.observe(now - live.last_token_s)
                else:
                    metrics.ttft_s.observe(now - live.arrived_s)
                live.last_token_s = now
                live.sink.token(event.text)
            else:
                self._end(event, live, now)

    def _end(self, event: Finished, live: _Live, now: float) -> None:
        del self._live[event.id]
        self._metrics.finished[event.reason] += 1
        self._metrics.e2e_s.observe(now - live.arrived_s)
        if event.vector is not None:
            live.sink.vector(event.vector, event.prompt_tokens)
        else:
            live.sink.done(event.reason, event.prompt_tokens, event.completion_tokens)

    def _loaded(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ready = self._thread is not None

    def _failed(self, message: str) -> None:
        self._ready = False
        self._failure = message
        dropped, self._live = self._live, {}
        for live in dropped.values():
            live.sink.error(500, f"The engine failed: {message}.", "server_error", "engine_error")

    # ---- the worker's thread

    def _work(self, file: GgufFile, shape: Shape) -> None:
        try:
            with file:
                tokenizer = Tokenizer.from_gguf(file.metadata)
                weights = load_weights(file, shape)
            with contextlib.closing(
                Model(shape, weights, self._scheduler.slots, self.max_model_len, self._threads)
            ) as model:
                self._tell(self._loaded, tokenizer)
                self._serve(model)
        except EngineError as error:
            _log.error("embedded engine: %s", error)
            self._tell(self._failed, str(error))
        except Exception as error:
            _log.exception("embedded engine stopped")
            self._tell(self._failed, f"{type(error).__name__}: {error}")

    def _serve(self, model: Model) -> None:
        scheduler = self._scheduler
        while True:
            for name, argument in self._inbox.take(wait=not scheduler.has_work):
                if name == "stop":
                    return
                if isinstance(argument, Sequence):
                    scheduler.add(argument)
                else:
                    scheduler.abort(argument)
            spans = scheduler.plan()
            began_s = time.monotonic()
            # No spans: an abort left nothing to do, and only this report will show it.
            events = self._step(model, spans) if spans else []
            self._tell(self._deliver, self._account(spans, events, began_s))

    def _step(self, model: Model, spans: list[Span]) -> list[Event]:
        result = model.forward(spans)
        tokens = choose(result.logits, [span.sequence.draw for span in spans if span.want is Want.TOKEN])
        return self._scheduler.commit(spans, tokens, [each.tolist() for each in result.sums])

    def _account(self, spans: list[Span], events: list[Event], began_s: float) -> _Report:
        scheduler = self._scheduler
        return _Report(
            events=events,
            admitted=[span.sequence.id for span in spans if span.start == 0],
            batch=len(spans),
            began_s=began_s,
            took_s=time.monotonic() - began_s,
            running=scheduler.running,
            waiting=scheduler.waiting,
            cache_usage=scheduler.cache_usage,
            prompt_tokens=scheduler.totals.prompt_tokens,
            generated_tokens=scheduler.totals.generated_tokens,
        )

    def _tell(self, call: Callable[[Unpack[Args]], None], *args: *Args) -> None:
        """Calls on the event loop's thread; nobody is told once that loop has closed."""
        assert self._loop is not None, "start() sets the loop before the worker runs"
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)


def _checked_ids(ids: list[int], tokenizer: Tokenizer, limit: int) -> list[int]:
    if len(ids) > limit:
        raise PromptTooLongError
    for each in ids:
        if not 0 <= each < tokenizer.size:
            raise PromptError(f"prompt has token id {each}; this model's ids are 0 to {tokenizer.size - 1}")
    return list(ids)
