"""What an engine is to the HTTP server in front of it: jobs go in, tokens come back through a sink."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

JobKind = Literal["chat", "completion", "embedding"]

GENERATIVE_KINDS: frozenset[str] = frozenset({"chat", "completion"})


class Job(msgspec.Struct, kw_only=True):
    """One generation (or one vector) that an engine is asked for; a request with `n=4` becomes four jobs.

    `messages` (chat) have string contents: the server has joined text parts and refused other ones.
    `prompt` (completion, embedding) is text or token ids. `max_tokens` is None when the client set no cap.
    """

    id: str
    kind: JobKind
    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    request_id: str = ""
    """Shared by all jobs of one HTTP request."""
    siblings: int = 1
    """How many jobs that HTTP request has; all of them are submitted in one go."""
    stream: bool = False


class Sink(Protocol):
    """Where an engine puts what it makes for one job. Called on the event loop's thread only.

    A job ends with exactly one of `done`, `vector` or `error`; calls after that, or after the client left,
    are ignored.
    """

    def begin(self) -> None:
        """Commit to a 200 before the first token; optional, the first `token` does it as well."""

    def token(self, text: str) -> None:
        """One generated token's text, which may be empty."""

    def done(self, finish_reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        """The generation is complete. A negative `prompt_tokens` leaves `usage` out of the answer."""

    def vector(self, values: list[float], prompt_tokens: int) -> None:
        """The embedding of the job's input."""

    def error(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        """The job fails: an HTTP error, or an error event once the stream has begun. `kind`: `error.type`."""


class ServedEngine(Protocol):
    """An engine that the server can put on a port.

    An engine that also makes vectors has an attribute `kinds`, the set of `JobKind`s it serves; without it
    the server takes chat and completion for granted and answers 404 to embeddings.
    """

    model_id: str
    max_model_len: int

    def submit(self, job: Job, sink: Sink) -> None:
        """Take a job; never raises and never blocks: a refusal is `sink.error`, at once or later."""

    def abort(self, job_id: str) -> None:
        """The client left: the slot is freed at once, the sink is not called again. Unknown ids pass."""

    def ready(self) -> bool:
        """Whether jobs are taken now. The server answers 503 by itself while this is false."""

    def metrics(self) -> str:
        """Prometheus text, with the `vllm:*` names that routers and autoscalers know."""

    async def start(self) -> None:
        """Load and start. The port is already open meanwhile and answers 503."""

    async def stop(self) -> None:
        """Free everything; jobs still running are dropped."""


def kinds_of(engine: ServedEngine) -> frozenset[str]:
    """The job kinds that `engine` serves."""
    return frozenset(getattr(engine, "kinds", GENERATIVE_KINDS))
