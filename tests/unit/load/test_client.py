"""The client against a small scripted server: split answers, resets, silence, retries, patience."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from forebay.load.attack import queue_wait_ms, record_of
from forebay.load.client import Call, Client
from forebay.load.target import Target
from forebay.load.workload import Magazine, Workload
from forebay.report.records import RequestRecord
from forebay.workload.arrival import Arrival
from forebay.workload.retry import NaiveRetry, NoRetry, RetryPolicy, SdkRetry

Answer = Callable[[asyncio.StreamWriter, int], Awaitable[None]]

OK_BODY = b'{"choices":[{"text":"hi"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}'
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nserver-timing: queue;dur=12.5\r\n\r\n%b" % (len(OK_BODY), OK_BODY)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


def refusal(reason: str, status: int = 503, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} No\r\nx-forebay-reason: {reason}\r\n{headers}content-length: 2\r\n\r\n{{}}".encode()


def chunked(data: bytes, size: int) -> bytes:
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class Scripted:
    """Answers the n-th request with the n-th script (the last one repeats); keeps the requests' heads."""

    def __init__(self, *scripts: bytes | Answer) -> None:
        self.scripts = scripts
        self.heads: list[bytes] = []
        self.connections = 0
        self.readers: list[asyncio.StreamReader] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.readers.append(reader)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                script = self.scripts[min(len(self.heads), len(self.scripts) - 1)]
                self.heads.append(head)
                if isinstance(script, bytes):
                    writer.write(script)
                else:
                    await script(writer, len(self.heads))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return uvloop.run(coroutine)


async def exchange(
    server: Scripted, calls: int = 1, policy: RetryPolicy | None = None, patience_s: float | None = None, **options: Any
) -> list[RequestRecord]:
    """Sends calls one after another and gives their records."""
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    target = Target.parse(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    done: asyncio.Queue[Call] = asyncio.Queue()
    client = Client(target, policy or NoRetry(), done.put_nowait, patience_s=patience_s, **options)
    magazine = Magazine(Workload("completions", stream=options.pop("stream", True)), target.authority, "", 1)
    start_ns = time.monotonic_ns()
    records = []
    for index in range(calls):
        arrival = Arrival(time.monotonic_ns() - start_ns, "x")
        client.send(Call(index, arrival, magazine.shot(arrival), start_ns + arrival.at_ns))
        records.append(record_of(await asyncio.wait_for(done.get(), 5), start_ns))
    assert client.in_flight == 0
    await client.close()
    listener.close()
    return records


def one(*scripts: bytes | Answer, **options: Any) -> RequestRecord:
    records = run(exchange(Scripted(*scripts), **options))
    assert len(records) == 1
    record: RequestRecord = records[0]
    return record


def test_a_plain_answer() -> None:
    record = one(OK)
    assert (record.outcome, record.status, record.output_tokens, record.prompt_tokens) == ("completed", 200, 2, 5)
    assert record.queue_wait_ms == 12.5
    assert record.first_token_ns == -1
    assert record.intended_ns <= record.sent_ns <= record.done_ns


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_cut_anywhere(size: int) -> None:
    async def answer(writer: asyncio.StreamWriter, _: int) -> None:
        data = STREAM_HEAD + chunked(EVENTS, 11)
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await asyncio.sleep(0)

    record = one(answer)
    assert (record.outcome, record.output_tokens) == ("completed", 2)
    assert record.sent_ns <= record.first_token_ns <= record.done_ns


def test_connections_are_used_again() -> None:
    server = Scripted(OK)
    records = run(exchange(server, calls=5))
    assert [record.outcome for record in records] == ["completed"] * 5
    assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (refusal("queue_full"), "shed"),
        (refusal("queue_wait"), "shed"),
        (refusal("key_tokens", 429), "shed"),
        (refusal("never_fits", 413), "shed"),
        (refusal("expired"), "evicted"),
        (refusal("displaced"), "evicted"),
        (refusal("invalid_key", 401), "failed"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", "failed"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", "failed"),
        (b"nonsense\r\n\r\n", "failed"),
        (STREAM_HEAD + chunked(EVENTS[:-14], 99), "failed"),
        (STREAM_HEAD + chunked(b'data: {"error":{"message":"engine died"}}\n\n', 99), "failed"),
    ],
    ids=str,
)
def test_every_answer_has_one_outcome(answer: bytes, outcome: str) -> None:
    assert one(answer).outcome == outcome


def test_an_answer_that_ends_with_the_connection_is_complete() -> None:
    async def until_close(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + OK_BODY)
        writer.close()

    record = one(until_close)
    assert (record.outcome, record.output_tokens) == ("completed", 2)


def test_a_reset_in_the_middle_of_a_stream_is_a_failure_and_keeps_its_tokens() -> None:
    async def reset(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(STREAM_HEAD + chunked(EVENTS, 99)[:60])
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.transport.abort()

    record = one(reset, policy=SdkRetry())
    assert (record.outcome, record.attempts, record.output_tokens) == ("failed", 1, 1)
    assert "middle of the answer" in record.error


def test_a_connection_closed_while_idle_is_replaced_silently() -> None:
    async def answer_then_close(writer: asyncio.StreamWriter, number: int) -> None:
        if number == 2:
            writer.transport.abort()
            return
        writer.write(OK)

    server = Scripted(answer_then_close)
    records = run(exchange(server, calls=2))
    assert [(record.outcome, record.attempts) for record in records] == [("completed", 1), ("completed", 1)]
    assert server.connections == 2


def test_a_fresh_connection_closed_without_an_answer_is_a_failure() -> None:
    async def slam(writer: asyncio.StreamWriter, _: int) -> None:
        writer.transport.abort()

    record = one(slam)
    assert (record.outcome, record.status) == ("failed", 0)
    assert "without an answer" in record.error


def test_nobody_listening_is_a_failure_that_says_so() -> None:
    async def refused() -> RequestRecord:
        listener = await asyncio.start_server(Scripted(OK).serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        await listener.wait_closed()
        target = Target.parse(f"http://127.0.0.1:{port}")
        done: asyncio.Queue[Call] = asyncio.Queue()
        client = Client(target, NoRetry(), done.put_nowait)
        call = Call(0, Arrival(0, "x"), Magazine(Workload(), "h", "", 1).shot(Arrival(0, "x")), time.monotonic_ns())
        client.send(call)
        return record_of(await asyncio.wait_for(done.get(), 5), call.intended_ns)

    record = run(refused())
    assert record.outcome == "failed"
    assert "no connection to 127.0.0.1" in record.error


def test_patience_closes_the_connection_and_counts_the_tokens_so_far() -> None:
    closed = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(STREAM_HEAD + b"22\r\n" + EVENTS[:34] + b"\r\n")
        assert await server.readers[0].read() == b""
        closed.set()

    server = Scripted(slow)

    async def until_closed() -> RequestRecord:
        (record,) = await exchange(server, patience_s=0.05)
        await asyncio.wait_for(closed.wait(), 2)
        return record

    record = run(until_closed())
    assert (record.outcome, record.output_tokens) == ("cancelled", 1)
    assert 0.045 <= (record.done_ns - record.intended_ns) / 1e9 < 0.5


def test_patience_also_ends_a_back_off() -> None:
    record = one(refusal("queue_full", headers="retry-after: 30\r\n"), policy=SdkRetry(), patience_s=0.05)
    assert (record.outcome, record.attempts) == ("cancelled", 1)


def test_the_sdk_client_waits_as_told_then_succeeds() -> None:
    server = Scripted(refusal("queue_full", headers="retry-after-ms: 40\r\nretry-after: 9\r\n"), OK)
    (record,) = run(exchange(server, policy=SdkRetry()))
    assert (record.outcome, record.attempts, record.reason) == ("completed", 2, "")
    assert (record.done_ns - record.intended_ns) / 1e6 >= 38  # the loop's timers count whole milliseconds
    assert b"x-stainless-retry-count: 0\r\n" in server.heads[0]
    assert b"x-stainless-retry-count: 1\r\n" in server.heads[1]


@pytest.mark.parametrize("shows", [True, False])
def test_a_retry_ticket_goes_out_with_the_next_attempt_alone(shows: bool) -> None:
    told = "retry-after-ms: 1\r\nx-forebay-ticket: abc\r\n"
    server = Scripted(refusal("queue_full", headers=told), refusal("queue_full", headers="retry-after-ms: 1\r\n"), OK)
    (record,) = run(exchange(server, policy=SdkRetry(shows_tickets=shows)))
    assert (record.outcome, record.attempts) == ("completed", 3)
    assert [b"x-forebay-ticket: abc\r\n" in head for head in server.heads] == [False, shows, False]


def test_the_sdk_client_obeys_should_retry_false() -> None:
    server = Scripted(refusal("key_credits", 429, "x-should-retry: false\r\n"))
    (record,) = run(exchange(server, policy=SdkRetry()))
    assert (record.outcome, record.reason, len(server.heads)) == ("shed", "key_credits", 1)


def test_the_naive_client_hammers() -> None:
    server = Scripted(refusal("queue_full", headers="retry-after: 30\r\n"))
    (record,) = run(exchange(server, policy=NaiveRetry(max_retries=4)))
    assert (record.outcome, record.attempts, len(server.heads)) == ("shed", 5, 5)


def test_an_interim_answer_is_not_the_answer() -> None:
    assert one(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK).outcome == "completed"


def test_a_full_pool_is_counted_and_the_wait_is_in_the_latency() -> None:
    async def slowly(writer: asyncio.StreamWriter, _: int) -> None:
        await asyncio.sleep(0.03)
        writer.write(OK)

    async def crowd() -> tuple[list[RequestRecord], int]:
        listener = await asyncio.start_server(Scripted(slowly).serve, "127.0.0.1", 0)
        target = Target.parse(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        done: asyncio.Queue[Call] = asyncio.Queue()
        client = Client(target, NoRetry(), done.put_nowait, max_connections=1)
        magazine = Magazine(Workload(), target.authority, "", 1)
        start_ns = time.monotonic_ns()
        for index in range(3):
            client.send(Call(index, Arrival(0, "x"), magazine.shot(Arrival(0, "x")), start_ns))
        records = [record_of(await asyncio.wait_for(done.get(), 5), start_ns) for _ in range(3)]
        await client.close()
        listener.close()
        return records, client.tally.waited_for_connection

    records, waited = run(crowd())
    assert waited == 2
    assert [record.outcome for record in records] == ["completed"] * 3
    assert (records[2].done_ns - records[2].intended_ns) / 1e6 >= 89


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("queue;dur=3.5", 3.5),
        ('db;dur=1, queue;desc="q";dur="7"', 7.0),
        ("", None),
        ("queue", None),
        ("queue;dur=x", None),
    ],
)
def test_server_timing(header: str, expected: float | None) -> None:
    assert queue_wait_ms(header) == expected
