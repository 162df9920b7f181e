"""The simulated encoder behind a port: /v1/embeddings, one batch at a time."""

from __future__ import annotations

import math
import zlib
from random import Random

from forebay.engines.serving import Job, Sink
from forebay.engines.serving.metrics import EngineMetrics
from forebay.engines.simulated.encoder import BatchResult, EncoderModel
from forebay.engines.simulated.faults import Faults
from forebay.engines.simulated.pace import FaultyEngine, Steps
from forebay.engines.simulated.profile import EncoderProfile
from forebay.engines.simulated.text import tokens_of

MAX_BATCH = 128  # the largest batch that the curves were measured with
DIMENSIONS = 64  # vectors are not what is simulated: long ones would only cost JSON


class _Batch:
    """A request: its inputs make one batch."""

    __slots__ = ("jobs", "submitted_ns")

    def __init__(self, submitted_ns: int) -> None:
        self.jobs: dict[str, tuple[Sink, Job]] = {}
        self.submitted_ns = submitted_ns


class SimulatedEncoder(FaultyEngine):
    """`ServedEngine` over `EncoderModel`. The inputs of one request are one batch; requests queue in order."""

    kinds = frozenset({"embedding"})

    def __init__(
        self,
        profile: EncoderProfile,
        *,
        max_batch: int = MAX_BATCH,
        model_id: str | None = None,
        max_model_len: int = 512,
        time_scale: float = 1.0,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        """`max_batch`: most inputs in one request; `time_scale`: simulated seconds per real second."""
        super().__init__(
            model_id or profile.model,
            max_model_len,
            time_scale=time_scale,
            faults=faults or Faults(),
            seed=seed,
        )
        self._model = EncoderModel(profile, max_batch)
        self._model.slowdown = self._initial_faults.slow_factor
        self._batches: dict[str, _Batch] = {}
        self._request_of: dict[str, str] = {}
        self._metrics = EngineMetrics(self.model_id)
        self._result: BatchResult | None = None

    # --- `ServedEngine` ---

    def submit(self, job: Job, sink: Sink) -> None:
        if not self._passes(job, sink):
            return
        batch = self._batches.get(job.request_id)
        if batch is None:
            running = self._model.running.size if self._model.running is not None else 0
            if self._is_full(running + self._model.num_waiting, sink, stream=False):
                self._metrics.rejections["max_num_queued_reqs"] += 1
                return
            if job.siblings > self._model.max_batch:
                message = f"The input has {job.siblings} entries, the most allowed is {self._model.max_batch}"
                sink.error(400, message, "BadRequestError")
                return
            batch = self._batches[job.request_id] = _Batch(self._pacer.now())
        tokens = tokens_of(job.prompt or "")
        batch.jobs[job.id] = (sink, job)
        self._request_of[job.id] = job.request_id
        if tokens > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens, an input has {tokens}"
            self._drop(job.id)
            sink.error(400, message, "BadRequestError")
        elif len(batch.jobs) == job.siblings:
            self._model.submit(job.request_id, job.siblings, batch.submitted_ns)
            self._pacer.wake()

    def abort(self, job_id: str) -> None:
        if job_id in self._request_of:
            self._drop(job_id)
            self._metrics.finished["abort"] += 1

    def metrics(self) -> str:
        running = self._model.running.size if self._model.running is not None else 0
        return self._metrics.text(
            running=running,
            waiting=self._model.num_waiting,
            kv_usage=0.0,
            max_batch=self._model.max_batch,
            cache_config={},
        )

    # --- `Steps` ---

    def begin_step(self, start: int) -> int | None:
        self._result = result = self._model.step(start)
        if result is None:
            return None
        batch = self._batches.get(result.id)
        if batch is not None:
            self._metrics.queue_s.observe(self._pacer.wall_s(start - batch.submitted_ns))
        return result.duration_ns

    def end_step(self, end: int) -> None:
        self._crash_if_due()
        result = self._result
        if result is None:
            return
        metrics = self._metrics
        metrics.stepped(self._pacer.wall_s(result.duration_ns), result.size)
        batch = self._batches.pop(result.id, None)
        if batch is None:  # all its clients have left
            return
        metrics.e2e_s.observe(self._pacer.wall_s(end - batch.submitted_ns))
        for job_id, (sink, job) in batch.jobs.items():
            self._request_of.pop(job_id, None)
            tokens = tokens_of(job.prompt or "")
            metrics.prompt_tokens += tokens
            metrics.finished["stop"] += 1
            sink.vector(_vector(job.prompt or ""), self._faults().reported(tokens, 0)[0])

    # --- inside ---

    def _drop(self, job_id: str) -> None:
        """Forget one job, and the batch with its last one."""
        request_id = self._request_of.pop(job_id)
        batch = self._batches[request_id]
        del batch.jobs[job_id]
        if not batch.jobs:
            del self._batches[request_id]
            self._model.abort(request_id, self._pacer.now())

    def _as_steps(self) -> Steps:
        return self

    def _on_faults(self, faults: Faults) -> None:
        self._model.slowdown = faults.slow_factor


def _vector(text: str | list[int]) -> list[float]:
    """A unit vector that only depends on the input."""
    rng = Random(zlib.crc32(repr(text).encode("utf-8", "surrogatepass")))
    values = [rng.random() - 0.5 for _ in range(DIMENSIONS)]
    norm = math.sqrt(sum(value * value for value in values))
    return [value / norm for value in values]
