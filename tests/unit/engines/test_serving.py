"""The HTTP server in front of a scripted engine, over loopback sockets: what the simulated engine never does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from forebay.engines.serving import Job, Sink, serve
from forebay.errors import EngineError


class ScriptedEngine:
    """Keeps the sinks for the test to play on."""

    model_id = "scripted"
    max_model_len = 100

    def __init__(self) -> None:
        self.jobs: list[tuple[Job, Sink]] = []
        self.aborted: list[str] = []
        self.refuse_from: int | None = None
        self.is_ready = True
        self.stopped = False
        self.submitted = asyncio.Event()
        self.left = asyncio.Event()

    def submit(self, job: Job, sink: Sink) -> None:
        if self.refuse_from is not None and len(self.jobs) >= self.refuse_from:
            sink.error(429, "no more", "rate_limit_error", "too_many")
            return
        self.jobs.append((job, sink))
        self.submitted.set()

    def abort(self, job_id: str) -> None:
        self.aborted.append(job_id)
        self.left.set()

    def ready(self) -> bool:
        return self.is_ready

    def metrics(self) -> str:
        return "up 1\n"

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.stopped = True


class Client:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, body: dict[str, object], path: str = "/v1/completions") -> None:
        data = json.dumps(body).encode()
        self.writer.write(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data)
        )

    async def until(self, marker: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(marker), 2)

    async def whole(self) -> tuple[int, dict[str, object]]:
        """An answer with a content-length: status and JSON body."""
        head = (await self.until(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = await self.reader.readexactly(length)
        return int(head.split()[1]), json.loads(body) if body else {}


Play = Callable[[ScriptedEngine, Client, asyncio.Task[None]], Awaitable[None]]


def play(script: Play) -> ScriptedEngine:
    """Serve a scripted engine on a free port, connect, run `script`, and end the server."""

    async def main() -> ScriptedEngine:
        engine = ScriptedEngine()
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(engine, "127.0.0.1", 0, on_started=port.set_result))
        client = Client(*await asyncio.open_connection("127.0.0.1", await port))
        try:
            await asyncio.wait_for(script(engine, client, server), 5)
        finally:
            client.writer.close()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
        assert engine.stopped
        return engine

    return asyncio.run(main())


def test_an_error_after_the_first_token_is_an_event_and_the_connection_lives_on() -> None:
    async def script(engine: ScriptedEngine, client: Client, _: asyncio.Task[None]) -> None:
        client.send({"prompt": "x", "stream": True})
        await engine.submitted.wait()
        sink = engine.jobs[0][1]
        sink.token("one")
        assert b'"text":"one"' in await client.until(b"\n\n\r\n")
        sink.error(500, "broke", "InternalServerError", "gone")
        sink.token("late")
        sink.done("stop", 1, 1)
        rest = await client.until(b"0\r\n\r\n")
        assert rest.count(b"data: ") == 2
        event = json.loads(rest.split(b"data: ")[1].split(b"\n\n")[0])
        assert event == {"error": {"message": "broke", "type": "InternalServerError", "param": None, "code": "gone"}}
        assert b"data: [DONE]" in rest
        engine.submitted.clear()
        client.send({"prompt": "x"})
        await engine.submitted.wait()
        engine.jobs[1][1].done("stop", 1, 0)
        assert (await client.whole())[0] == 200

    play(script)


def test_an_error_before_the_first_token_is_a_status_in_a_stream_too() -> None:
    async def script(engine: ScriptedEngine, client: Client, _: asyncio.Task[None]) -> None:
        engine.refuse_from = 0
        client.send({"prompt": "x", "stream": True})
        status, body = await client.whole()
        assert status == 429
        assert body["error"] == {"message": "no more", "type": "rate_limit_error", "param": None, "code": "too_many"}

    play(script)


def test_a_refused_choice_takes_its_siblings_with_it() -> None:
    async def script(engine: ScriptedEngine, client: Client, _: asyncio.Task[None]) -> None:
        engine.refuse_from = 2
        client.send({"prompt": "x", "n": 4})
        status, _body = await client.whole()
        assert status == 429

    engine = play(script)
    assert engine.aborted == [job.id for job, _ in engine.jobs]
    assert len(engine.aborted) == 2  # and the fourth was never handed in


def test_tokens_of_one_turn_leave_in_one_piece() -> None:
    async def script(engine: ScriptedEngine, client: Client, _: asyncio.Task[None]) -> None:
        client.send({"messages": [{"role": "user", "content": "x"}], "stream": True}, "/v1/chat/completions")
        await engine.submitted.wait()
        sink = engine.jobs[0][1]
        for text in ("a", 'quo"te', "line\n", "é", ""):
            sink.token(text)
        sink.done("stop", 1, 5)
        data = await client.reader.read(1 << 16)  # one read gets it all
        events = [part.split(b"\n\n")[0] for part in data.split(b"data: ")[1:]]
        assert events[-1] == b"[DONE]"
        parsed = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert [one["delta"]["content"] for one in parsed] == ["", "a", 'quo"te', "line\n", "é", "", ""]
        assert parsed[-1]["finish_reason"] == "stop"

    play(script)


def test_what_the_engine_is_asked_for() -> None:
    async def script(engine: ScriptedEngine, client: Client, _: asyncio.Task[None]) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        client.send(
            {
                "model": "scripted",
                "messages": [{"role": "system", "content": None}, {"role": "user", "content": parts}],
                "max_tokens": 5,
                "max_completion_tokens": 7,
                "stop": "END",
                "temperature": 0,
                "seed": 3,
                "n": 2,
                "ignore_eos": True,
                "unknown": {"is": "ignored"},
            },
            "/v1/chat/completions",
        )
        await engine.submitted.wait()
        first, second = (job for job, _ in engine.jobs)
        assert first.messages == [{"role": "system", "content": ""}, {"role": "user", "content": "one\ntwo"}]
        assert (first.kind, first.max_tokens, first.stop, first.temperature) == ("chat", 7, ("END",), 0.0)
        assert (first.seed, second.seed, first.ignore_eos, first.siblings) == (3, 4, True, 2)
        assert first.request_id == second.request_id
        assert first.id != second.id

    play(script)


def test_a_client_that_leaves_aborts_what_is_not_finished() -> None:
    async def script(engine: ScriptedEngine, client: Client, _: asyncio.Task[None]) -> None:
        client.send({"prompt": "x", "n": 3, "stream": True})
        await engine.submitted.wait()
        engine.jobs[1][1].done("stop", 1, 1)
        await client.until(b"\n\n")
        client.writer.close()
        await engine.left.wait()
        engine.jobs[0][1].token("into the void")

    engine = play(script)
    assert engine.aborted == [engine.jobs[0][0].id, engine.jobs[2][0].id]


def test_not_ready_is_503() -> None:
    async def script(engine: ScriptedEngine, client: Client, _: asyncio.Task[None]) -> None:
        engine.is_ready = False
        client.send({"prompt": "x"})
        assert (await client.whole())[0] == 503
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.whole())[0] == 503
        assert engine.jobs == []

    play(script)


def test_a_cancelled_server_cuts_off_what_runs() -> None:
    async def script(engine: ScriptedEngine, client: Client, server: asyncio.Task[None]) -> None:
        client.send({"prompt": "x"})
        await engine.submitted.wait()
        server.cancel()
        assert await client.reader.read() == b""

    engine = play(script)
    assert engine.aborted == [engine.jobs[0][0].id]


def test_an_engine_that_cannot_start_ends_the_server() -> None:
    class Broken(ScriptedEngine):
        async def start(self) -> None:
            raise EngineError("no weights")

    async def main() -> bool:
        engine = Broken()
        with pytest.raises(EngineError, match="no weights"):
            await serve(engine, "127.0.0.1", 0)
        return engine.stopped

    assert asyncio.run(main())


def test_a_port_in_use_is_said_plainly() -> None:
    async def main() -> None:
        listener = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another --port"):
            await serve(ScriptedEngine(), "127.0.0.1", port)
        listener.close()

    asyncio.run(main())
