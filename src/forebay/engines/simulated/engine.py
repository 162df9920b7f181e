"""The simulated language model behind a port."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from forebay.engines.serving import Job, Sink, StopMatcher
from forebay.engines.serving.metrics import EngineMetrics
from forebay.engines.simulated.faults import Faults
from forebay.engines.simulated.model import EngineLimits, EngineModel, StepResult
from forebay.engines.simulated.pace import FaultyEngine, Steps
from forebay.engines.simulated.profile import StepProfile
from forebay.engines.simulated.text import OutputLengths, filler_tokens, tokens_of, tokens_of_chat

KV_BLOCK_TOKENS = 16


class _Live:
    """A job in the engine."""

    __slots__ = ("first_ns", "last_ns", "made", "offset", "prompt_tokens", "reason", "sink", "submitted_ns", "texts")

    def __init__(self, sink: Sink, prompt_tokens: int, reason: str, offset: int, submitted_ns: int) -> None:
        self.sink, self.prompt_tokens, self.reason, self.offset = sink, prompt_tokens, reason, offset
        self.submitted_ns = submitted_ns
        self.first_ns = self.last_ns = -1
        self.made = 0
        self.texts: Sequence[str] | None = None  # only where stop strings cut the filler


class SimulatedEngine(FaultyEngine):
    """`ServedEngine` over `EngineModel`: streams filler text at the pace of the calibrated GPU."""

    def __init__(
        self,
        profile: StepProfile,
        limits: EngineLimits,
        *,
        model_id: str | None = None,
        max_model_len: int = 131_072,
        time_scale: float = 1.0,
        seed: int = 0,
        output_mean: float = 200.0,
        output_sigma: float = 0.7,
        prefix_hit: float = 0.0,
        noise: float = 0.0,
        faults: Faults | None = None,
    ) -> None:
        """`time_scale`: simulated seconds per real second; `output_mean` and `output_sigma`: lengths of answers
        that end by themselves, see `OutputLengths`; `prefix_hit` and `noise`: see `EngineModel`."""
        super().__init__(
            model_id or profile.model,
            min(max_model_len, limits.kv_tokens),
            time_scale=time_scale,
            faults=faults or Faults(),
            seed=seed,
        )
        self._profile, self._limits = profile, limits
        self._model = EngineModel(profile, limits, prefix_hit=prefix_hit, noise=noise, rng=Random(f"{seed}/steps"))
        self._model.slowdown = self._initial_faults.slow_factor
        self._lengths = OutputLengths(output_mean, output_sigma)
        self._rng = Random(f"{seed}/answers")
        self._texts = filler_tokens(Random(f"{seed}/text"))
        self._live: dict[str, _Live] = {}
        self._metrics = EngineMetrics(self.model_id)
        self._result: StepResult | None = None

    # --- `ServedEngine` ---

    def submit(self, job: Job, sink: Sink) -> None:
        if not self._passes(job, sink):
            return
        if self._is_full(self._model.num_running + self._model.num_waiting, sink, stream=job.stream):
            self._metrics.rejections["max_num_queued_reqs"] += 1
            return
        prompt = tokens_of_chat(job.messages) if job.messages is not None else tokens_of(job.prompt or "")
        room = self.max_model_len - prompt
        if room < (job.max_tokens or 1):
            sink.error(400, self._too_long(prompt, job.max_tokens), "BadRequestError")
            return
        rng = self._rng if job.seed is None else Random(job.seed)
        cap = job.max_tokens or room
        drawn = self._lengths.draw(rng)
        output = cap if job.ignore_eos else min(cap, drawn)
        reason = "length" if job.ignore_eos or drawn >= cap else "stop"
        live = _Live(sink, prompt, reason, rng.randrange(len(self._texts)), self._pacer.now())
        if job.stop:
            output = self._cut_at_stop(live, job.stop, output)
        self._model.submit(job.id, prompt, output, live.submitted_ns)
        self._live[job.id] = live
        self._pacer.wake()

    def abort(self, job_id: str) -> None:
        if self._live.pop(job_id, None) is not None:
            self._model.abort(job_id, self._pacer.now())
            self._metrics.finished["abort"] += 1

    def metrics(self) -> str:
        self._metrics.preemptions = self._model.preemptions
        return self._metrics.text(
            running=self._model.num_running,
            waiting=self._model.num_waiting,
            kv_usage=self._model.kv_usage,
            max_batch=self._limits.max_num_seqs,
            cache_config={
                "block_size": str(KV_BLOCK_TOKENS),
                "num_gpu_blocks": str(self._limits.kv_tokens // KV_BLOCK_TOKENS),
                "kv_cache_size_tokens": str(self._limits.kv_tokens),
            },
        )

    # --- `Steps` ---

    def begin_step(self, start: int) -> int | None:
        self._result = result = self._model.step(start)
        if result is None:
            return None
        for job_id in result.admitted:
            live = self._live.get(job_id)
            if live is not None and live.made == 0:
                self._metrics.queue_s.observe(self._pacer.wall_s(start - live.submitted_ns))
        return result.duration_ns

    def end_step(self, end: int) -> None:
        self._crash_if_due()
        result = self._result
        if result is None:
            return
        metrics = self._metrics
        metrics.stepped(self._pacer.wall_s(result.duration_ns), result.batch_seqs)
        gaps: dict[int, int] = {}
        fail_at = self._faults().faults.error_after_tokens
        for job_id, _ in result.tokens:
            live = self._live.get(job_id)
            if live is not None and self._emit(live, end, gaps) == fail_at:  # None: aborted during the step
                self._fail(job_id, live)
        for gap, times in gaps.items():
            metrics.itl_s.observe(self._pacer.wall_s(gap), times)
        for job_id in result.finished:
            live = self._live.pop(job_id, None)
            if live is not None:
                self._finish(live, end)

    # --- inside ---

    def _emit(self, live: _Live, end: int, gaps: dict[int, int]) -> int:
        """Send a job's next token; returns how many it has now."""
        if live.made:
            gap = end - live.last_ns
            gaps[gap] = gaps.get(gap, 0) + 1
        else:
            live.first_ns = end
            self._metrics.ttft_s.observe(self._pacer.wall_s(end - live.submitted_ns))
            self._metrics.prompt_tokens += live.prompt_tokens
        live.last_ns = end
        self._metrics.generation_tokens += 1
        if live.texts is None:
            text = self._texts[(live.offset + live.made) % len(self._texts)]
        else:
            text = live.texts[live.made]
        live.made += 1
        live.sink.token(text)
        return live.made

    def _finish(self, live: _Live, end: int) -> None:
        self._metrics.finished[live.reason] += 1
        self._metrics.e2e_s.observe(self._pacer.wall_s(end - live.submitted_ns))
        live.sink.done(live.reason, *self._faults().reported(live.prompt_tokens, live.made))

    def _fail(self, job_id: str, live: _Live) -> None:
        if self._live.pop(job_id, None) is None:  # its client was cut off while the token was written
            return
        self._model.abort(job_id, self._pacer.now())
        live.sink.error(500, f"Injected fault: failed after {live.made} tokens", "InternalServerError")

    def _cut_at_stop(self, live: _Live, stops: tuple[str, ...], output: int) -> int:
        """Filler is known beforehand, so is where it meets a stop string. Returns the tokens until there."""
        matcher = StopMatcher(stops)
        texts: list[str] = []
        live.texts = texts
        for made in range(output):
            text, stopped = matcher.feed(self._texts[(live.offset + made) % len(self._texts)])
            texts.append(text)
            if stopped:
                live.reason = "stop"
                return made + 1
        texts[-1] += matcher.flush()
        return output

    def _too_long(self, prompt: int, max_tokens: int | None) -> str:
        asked = f"{max_tokens} output tokens were asked for and " if max_tokens else ""
        return (
            f"This model's maximum context length is {self.max_model_len} tokens. However, {asked}the prompt "
            f"has {prompt} tokens. Shorten the prompt or lower max_tokens."
        )

    def _as_steps(self) -> Steps:
        return self

    def _on_faults(self, faults: Faults) -> None:
        self._model.slowdown = faults.slow_factor
