"""The engine as a server sees it, on the tiny model: real worker thread, real event loop, no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.embedded import build
from forebay.engines.embedded.engine import EmbeddedEngine
from forebay.engines.serving.engine import Job
from forebay.errors import EngineError, UsageError


class Client:
    """A sink that keeps what it gets; `ended` is set by the one call that ends a job."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.end: tuple[Any, ...] = ()
        self.ended = asyncio.Event()

    def begin(self) -> None:
        pass

    def token(self, text: str) -> None:
        assert not self.end
        self.texts.append(text)

    def _finish(self, *end: Any) -> None:
        assert not self.end
        self.end = end
        self.ended.set()

    def done(self, finish_reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        self._finish("done", finish_reason, prompt_tokens, completion_tokens)

    def vector(self, values: list[float], prompt_tokens: int) -> None:
        self._finish("vector", values, prompt_tokens)

    def error(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        self._finish("error", status, message, kind, code)


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 (the engine has no event for what a test waits for)
        await asyncio.sleep(0.001)


Scenario = Callable[[EmbeddedEngine], Awaitable[None]]


def run(path: Path, scenario: Scenario, *, slots: int = 2, context: int = 100, max_waiting: int = 8) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(path, slots=slots, context=context, threads=1, max_waiting=max_waiting)
        await engine.start()
        try:
            await until(engine.ready)
            await scenario(engine)
        finally:
            await engine.stop()
        assert not engine.ready()

    asyncio.run(asyncio.wait_for(main(), 20))


def submit(engine: EmbeddedEngine, name: str, **job: Any) -> Client:
    client = Client()
    job.setdefault("prompt", None if "messages" in job else "hello wo")
    job = {"kind": "completion", "temperature": 0.0, "ignore_eos": True, **job}
    engine.submit(Job(id=name, model=engine.model_id, **job), client)
    return client


async def finish(*clients: Client) -> None:
    await asyncio.gather(*(client.ended.wait() for client in clients))


def value(engine: EmbeddedEngine, metric: str) -> float:
    lines = [line for line in engine.metrics().splitlines() if line.startswith(metric)]
    assert len(lines) == 1, lines
    return float(lines[0].rsplit(" ", 1)[1])


def test_an_answer_is_streamed_token_by_token_and_counted(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        client = submit(engine, "a", max_tokens=5)
        await finish(client)
        assert client.end == ("done", "length", 2, 5)
        assert len(client.texts) == 5
        assert value(engine, "vllm:prompt_tokens_total") == 2
        assert value(engine, "vllm:generation_tokens_total") == 5
        assert value(engine, "vllm:time_to_first_token_seconds_count") == 1
        assert value(engine, "vllm:inter_token_latency_seconds_count") == 4
        assert value(engine, "vllm:e2e_request_latency_seconds_count") == 1
        assert value(engine, "forebay_engine_steps_total") == 5
        assert value(engine, "forebay_engine_batch_seqs_total") == 5
        assert value(engine, "forebay_engine_busy_seconds_total") > 0
        assert value(engine, "forebay_engine_max_batch") == 2
        assert value(engine, "vllm:num_requests_running") == 0

    run(tiny.path, scenario)


def test_greedy_answers_do_not_depend_on_the_company(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        prompts = [[10 + n, 20 + n, 30 + n] for n in range(6)]
        alone = []
        for n, prompt in enumerate(prompts):
            client = submit(engine, f"alone-{n}", prompt=prompt, max_tokens=8)
            await finish(client)
            alone.append(client.texts)
        together = [submit(engine, f"all-{n}", prompt=prompt, max_tokens=8) for n, prompt in enumerate(prompts)]
        await finish(*together)
        assert [client.texts for client in together] == alone
        assert value(engine, "forebay_engine_batch_seqs_total") > value(engine, "forebay_engine_steps_total")

    run(tiny.path, scenario, slots=4)


def test_a_seed_repeats_an_answer(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        clients = [
            submit(engine, f"{n}", temperature=1.5, seed=seed, max_tokens=12) for n, seed in enumerate((4, 4, 5))
        ]
        await finish(*clients)
        assert clients[0].texts == clients[1].texts != clients[2].texts

    run(tiny.path, scenario, slots=1)


def test_the_context_ends_an_answer_without_a_cap(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        client = submit(engine, "a", prompt=[9] * 30)
        await finish(client)
        assert client.end == ("done", "length", 30, 10)

    run(tiny.path, scenario, context=40)


@pytest.mark.parametrize(
    ("job", "code", "why"),
    [
        ({"prompt": [9] * 100}, "context_length_exceeded", "maximum context length is 100"),
        ({"prompt": "x" * 101}, "context_length_exceeded", "maximum context length is 100"),
        ({"kind": "chat", "messages": [{"role": "user", "content": "x" * 50}]}, "context_length_exceeded", "100"),
        ({"kind": "chat", "messages": [{"role": "nobody", "content": "x"}]}, "invalid_prompt", "'nobody'"),
        ({"prompt": [5, 9999]}, "invalid_prompt", "token id 9999"),
        ({"prompt": [-1]}, "invalid_prompt", "token id -1"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_a_400(tiny: Any, job: dict[str, Any], code: str, why: str) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        client = submit(engine, "a", **job)
        assert client.end, "refused at once"
        assert (client.end[1], client.end[3], client.end[4]) == (400, "invalid_request_error", code)
        assert why in client.end[2]

    run(tiny.path, scenario)


def test_an_empty_prompt_starts_a_document(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        client, same = submit(engine, "a", prompt="", max_tokens=4), submit(engine, "b", prompt=[0], max_tokens=4)
        await finish(client, same)
        assert client.end == ("done", "length", 1, 4)
        assert client.texts == same.texts

    run(tiny.path, scenario)


def test_a_stop_string_is_not_shown(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        whole = submit(engine, "a", max_tokens=12)
        await finish(whole)
        text = "".join(whole.texts)
        stop = text[4:6]
        client = submit(engine, "b", max_tokens=12, stop=(stop,))
        await finish(client)
        assert client.end[1] == "stop"
        assert "".join(client.texts) == text[: text.index(stop)]

    run(tiny.path, scenario)


def test_an_abort_frees_the_engine_and_silences_the_job(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        running, waiting = submit(engine, "a"), submit(engine, "b")
        await until(lambda: running.texts)
        assert value(engine, "vllm:num_requests_waiting") == 1
        engine.abort("b")
        engine.abort("a")
        engine.abort("a")
        count = len(running.texts)
        after = submit(engine, "c", max_tokens=3)
        await finish(after)
        assert (running.end, waiting.end) == ((), ())
        assert len(running.texts) == count
        assert waiting.texts == []
        assert (
            value(
                engine,
                'vllm:request_success_total{engine="0",model_name="smollm2-135m-instruct",finished_reason="abort"',
            )
            == 2
        )

    run(tiny.path, scenario, slots=1, context=128)


def test_the_last_abort_shows_in_the_metrics(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        client = submit(engine, "a")
        await until(lambda: client.texts)
        engine.abort("a")
        await until(lambda: value(engine, "vllm:num_requests_running") == 0)
        assert value(engine, "vllm:kv_cache_usage_perc") == 0

    run(tiny.path, scenario, context=128)


def test_the_waiting_line_is_bounded(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        held = [submit(engine, f"{n}", max_tokens=30) for n in range(3)]
        refused = submit(engine, "x")
        assert (refused.end[1], refused.end[4]) == (503, "queue_full")
        await finish(*held)
        again = submit(engine, "y", max_tokens=1)
        await finish(again)
        assert again.end == ("done", "length", 2, 1)

    run(tiny.path, scenario, slots=1, max_waiting=2)


def test_an_embedding_is_a_vector_of_the_models_width(tiny: Any) -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        same = [submit(engine, f"{n}", kind="embedding", prompt="hello wo") for n in range(2)]
        other = submit(engine, "o", kind="embedding", prompt="other")
        full = submit(engine, "f", kind="embedding", prompt=[7] * 100)
        await finish(*same, other, full)
        first = same[0].end
        assert (first[0], first[2]) == ("vector", 2)
        assert len(first[1]) == tiny.shape.width
        assert same[1].end[1] == pytest.approx(first[1], abs=1e-4)
        assert other.end[1] != pytest.approx(first[1], abs=1e-2)
        assert full.end[2] == 100

    run(tiny.path, scenario)


def test_before_it_is_ready_and_after_it_failed_jobs_get_a_503(tiny: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    # One layer is missing: only loading the weights finds that out.
    broken.write_bytes(tiny.path.read_bytes().replace(b"blk.1.ffn_down", b"blk.9.ffn_down"))

    async def main() -> None:
        engine = EmbeddedEngine(broken, slots=1, context=64, threads=1)
        await engine.start()
        early = submit(engine, "a")
        assert early.end[1] == 503
        assert "loading" in early.end[2]
        await until(lambda: "loading" not in submit(engine, "b").end[2])
        late = submit(engine, "c").end
        assert not engine.ready()
        assert late[1] == 503
        assert "blk.1.ffn_down" in late[2]
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_step_that_fails_ends_every_job_with_a_500(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.engines.embedded.model import Model

    forward = Model.forward

    def fail_on_a_batch(self: Model, spans: Any) -> Any:
        if len(spans) > 1:
            raise MemoryError("no room for the step")
        return forward(self, spans)

    monkeypatch.setattr(Model, "forward", fail_on_a_batch)

    async def scenario(engine: EmbeddedEngine) -> None:
        first = submit(engine, "a")
        await until(lambda: first.texts)
        second = submit(engine, "b")
        await finish(first, second)
        for client in (first, second):
            assert (client.end[1], client.end[3]) == (500, "server_error")
            assert "no room for the step" in client.end[2]
        assert not engine.ready()
        assert submit(engine, "c").end[1] == 503

    run(tiny.path, scenario, context=128)


def test_what_cannot_start_says_why_at_once(tiny: Any, tmp_path: Path) -> None:
    no_model = tmp_path / "x.gguf"
    no_model.write_bytes(b"not a model at all")
    with pytest.raises(EngineError, match="is not a GGUF file"):
        asyncio.run(EmbeddedEngine(no_model, slots=1, context=64, threads=1).start())
    with pytest.raises(EngineError, match="context 129 is more than this model's 128"):
        asyncio.run(EmbeddedEngine(tiny.path, slots=1, context=129, threads=1).start())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"slots": 1000}, "slots is 1000"),
        ({"context": 1}, "context is 1"),
        ({"threads": 0}, "threads is 0"),
        ({"model_path": "/no/such/model.gguf"}, "does not exist"),
    ],
)
def test_a_mistake_in_building_is_named(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build(**arguments)


def test_another_model_is_served_under_its_files_name(tiny: Any) -> None:
    engine = build(str(tiny.path), slots=3, context=64, threads=1)
    assert engine.model_id == "tiny"
    assert engine.max_model_len == 64
    assert "embedding" in engine.kinds
