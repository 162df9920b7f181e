"""The simulated engine as a real process, driven by the official client and by raw sockets."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest

FOREBAY = [sys.executable, "-c", "from forebay.cli import main; main()"]
CHAT = [{"role": "user", "content": "How does a forebay work?"}]


class Engine:
    """A running engine process."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*FOREBAY, "engine", "simulated", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        self.port = int(line.rsplit(":", 1)[1])
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=20
        )

    def request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    def metric(self, name: str, **labels: str) -> float:
        _, text = self.request("GET", "/metrics")
        for line in text.decode().splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels}")

    def wait_for(self, name: str, value: float, within_s: float = 2.0) -> None:
        until = time.monotonic() + within_s
        while self.metric(name) != value:
            assert time.monotonic() < until, f"{name} is {self.metric(name)}, not {value}, after {within_s} s"
            time.sleep(0.01)

    def faults(self, **settings: object) -> None:
        self.request("DELETE", "/faults")
        status, body = self.request("POST", "/faults", settings)
        assert status == 200, body

    def exchange(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Send raw bytes, read until the server closes (or is silent for two seconds)."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=2) as sock:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            got = b""
            try:
                while part := sock.recv(65536):
                    got += part
            except TimeoutError:
                pass
            return got

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        return self.process.returncode


@contextmanager
def running(*flags: str) -> Iterator[Engine]:
    engine = Engine(*flags)
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with running("--time-scale", "5", "--seed", "7", "--output-mean", "20", "--max-num-seqs", "64") as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.request("DELETE", "/faults")
    shared.wait_for("vllm:num_requests_running", 0)
    return shared


def post(path: str, body: bytes, headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST %b HTTP/%b\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n%b" % (
        path.encode(),
        version,
        len(body),
        headers,
        body,
    )


# --- answers ---


def test_chat(engine: Engine) -> None:
    answer = engine.client.chat.completions.create(model="llama-3.1-8b", messages=CHAT, max_completion_tokens=12)  # type: ignore[arg-type]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 10  # 24 bytes / 4, and 4 of the template
    assert answer.usage.completion_tokens == len(answer.choices[0].message.content.split())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_has_a_chunk_per_token_and_usage_when_asked(engine: Engine) -> None:
    chunks = list(
        engine.client.chat.completions.create(
            model="llama-3.1-8b",
            messages=CHAT,  # type: ignore[arg-type]
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(texts) == 9
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (10, 9)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_the_option_has_no_usage(engine: Engine) -> None:
    stream = engine.client.completions.create(model="llama-3.1-8b", prompt="hello", max_tokens=3, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_same_seed_same_answer_and_choices_differ(engine: Engine) -> None:
    def ask(seed: int) -> list[str]:
        answer = engine.client.completions.create(
            model="llama-3.1-8b", prompt="a prompt", max_tokens=40, n=3, seed=seed
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    assert ask(5) == ask(5) != ask(6)
    assert len(set(ask(5))) == 3


def test_several_prompts_and_token_ids(engine: Engine) -> None:
    answer = engine.client.completions.create(
        model="llama-3.1-8b", prompt=[[1, 2, 3], [4, 5]], n=2, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)  # a prompt counts once


def test_several_choices_in_one_stream(engine: Engine) -> None:
    stream = engine.client.chat.completions.create(
        model="llama-3.1-8b",
        messages=CHAT,  # type: ignore[arg-type]
        n=3,
        max_tokens=5,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    counts = [0, 0, 0]
    ends = [0, 0, 0]
    for chunk in stream:
        choice = chunk.choices[0]
        counts[choice.index] += bool(choice.delta.content)
        ends[choice.index] += choice.finish_reason is not None
    assert counts == [5, 5, 5]
    assert ends == [1, 1, 1]


def test_stop_strings_end_the_answer_and_are_not_shown(engine: Engine) -> None:
    def ask(**more: object) -> tuple[str, str]:
        answer = engine.client.completions.create(  # type: ignore[call-overload]
            model="llama-3.1-8b", prompt="x", max_tokens=60, seed=4, extra_body={"ignore_eos": True}, **more
        )
        return answer.choices[0].text, answer.choices[0].finish_reason

    whole, reason = ask()
    assert reason == "length"
    stop = whole[20:30]
    assert ask(stop=[stop, "never seen"]) == (whole[: whole.find(stop)], "stop")


def test_models_health_and_other_paths(engine: Engine) -> None:
    assert [model.id for model in engine.client.models.list()] == ["llama-3.1-8b"]
    assert engine.request("GET", "/health") == (200, b"")
    assert engine.request("GET", "/nothing")[0] == 404
    assert engine.request("GET", "/v1/chat/completions")[0] == 405
    assert engine.request("POST", "/metrics", {})[0] == 405


def test_metrics_count_what_was_served(engine: Engine) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "forebay_engine_steps_total")
    before = [engine.metric(name) for name in names]
    busy = engine.metric("forebay_engine_busy_seconds_total")
    ended = engine.metric("vllm:request_success_total", finished_reason="length")
    engine.client.completions.create(
        model="llama-3.1-8b", prompt=[[1] * 30, [2] * 30], max_tokens=10, extra_body={"ignore_eos": True}
    )
    after = [engine.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [20, 60, 10]
    assert engine.metric("vllm:request_success_total", finished_reason="length") - ended == 2
    # Ten steps of about 7 ms, at five times the speed.
    assert 0.010 < engine.metric("forebay_engine_busy_seconds_total") - busy < 0.020
    assert engine.metric("forebay_engine_max_batch") == 64
    assert engine.metric("vllm:cache_config_info", kv_cache_size_tokens="435000") == 1


# --- bad input ---


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"messages":[]}',
        b'{"messages":[{"content":"no role"}]}',
        b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":0}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":99999999999999999999}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":435001}',
        b'{"messages":[{"role":"user","content":"x"}],"n":129}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":3}',
        b'{"messages":[{"role":"user","content":"x"}],"stop":[""]}',
        b'{"messages":[{"role":"user","content":"x"}],"stream_options":{"include_usage":true}}',
        b'{"messages":' + b"[" * 100_000,
        b'{"messages":[{"role":"user","content":"\xff"}]}',
    ],
)
def test_bad_bodies_are_400_with_an_openai_error(engine: Engine, body: bytes) -> None:
    answer = engine.exchange(post("/v1/chat/completions", body, b"connection: close\r\n"))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 "), head
    error = json.loads(rest)["error"]
    assert error["message"]
    assert error["type"] == "BadRequestError"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], {"a": 1}, [-1], None])
def test_bad_prompts_are_400(engine: Engine, prompt: object) -> None:
    assert engine.request("POST", "/v1/completions", {"prompt": prompt})[0] == 400


def test_the_client_sees_the_right_error_classes(engine: Engine) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        engine.client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        engine.client.completions.create(model="llama-3.1-8b", prompt="x" * 4 * 140_000)
    with pytest.raises(openai.NotFoundError, match="does not serve"):
        engine.client.embeddings.create(model="llama-3.1-8b", input="x")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ],
)
def test_bad_http_is_refused_and_the_connection_closed(engine: Engine, data: bytes, status: int) -> None:
    started = time.monotonic()
    answer = engine.exchange(data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in answer
    assert time.monotonic() - started < 1.5, "the server left the connection open"


# --- HTTP ---


def test_pipelined_requests_are_answered_in_order(engine: Engine) -> None:
    one = post("/v1/completions", b'{"prompt":"a","max_tokens":3,"ignore_eos":true}')
    two = post("/v1/completions", b'{"prompt":"b","max_tokens":3,"ignore_eos":true,"stream":true}')
    last = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = engine.exchange(one + two + one * 20 + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 23
    assert answer.find(b"text/event-stream") < answer.find(b'"object":"list"')
    assert answer.count(b"data: [DONE]") == 1


def test_garbage_behind_a_good_request_ends_the_connection_after_its_answer(engine: Engine) -> None:
    one = post("/v1/completions", b'{"prompt":"a","max_tokens":3,"ignore_eos":true}')
    started = time.monotonic()
    answer = engine.exchange(one * 2 + b"garbage\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200 OK") == 2
    assert time.monotonic() - started < 1.5, "the server left the connection open"


def test_an_offered_upgrade_is_declined(engine: Engine) -> None:
    upgrade = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    assert engine.exchange(upgrade).startswith(b"HTTP/1.1 200 OK")
    offered = post("/v1/completions", b'{"prompt":"a"}', b"connection: upgrade\r\nupgrade: h2c\r\n")
    answer = engine.exchange(offered)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"without an Upgrade header" in answer


def test_many_pipelined_gets_do_not_grow_the_stack(engine: Engine) -> None:
    gets = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3000
    answer = engine.exchange(gets + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 3001


def test_http_1_0_streams_end_with_the_connection(engine: Engine) -> None:
    answer = engine.exchange(post("/v1/completions", b'{"prompt":"a","max_tokens":3,"stream":true}', version=b"1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.endswith(b"data: [DONE]\n\n")


def test_expect_continue_chunked_bodies_and_split_packets(engine: Engine) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    body = b'5\r\n{"pro\r\na\r\nmpt":"hi"}\r\n0\r\n\r\n'
    with socket.create_connection(("127.0.0.1", engine.port), timeout=5) as sock:
        for byte in head:
            sock.send(bytes([byte]))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_head_has_no_body(engine: Engine) -> None:
    answer = engine.exchange(b"HEAD /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"\r\n\r\n")


# --- leaving ---


def long_stream(engine: Engine) -> socket.socket:
    """A stream of a hundred thousand tokens, read up to its first token."""
    sock = socket.create_connection(("127.0.0.1", engine.port), timeout=5)
    body = b'{"prompt":"a","max_tokens":100000,"ignore_eos":true,"stream":true}'
    sock.sendall(post("/v1/completions", body))
    got = b""
    while b"data:" not in got:
        got += sock.recv(65536)
    return sock


@pytest.mark.parametrize("way", ["reset", "close", "half close"])
def test_a_client_that_leaves_frees_its_slot_at_once(engine: Engine, way: str) -> None:
    aborted = engine.metric("vllm:request_success_total", finished_reason="abort")
    socks = [long_stream(engine) for _ in range(8)]
    engine.wait_for("vllm:num_requests_running", 8)
    for sock in socks:
        if way == "half close":
            sock.shutdown(socket.SHUT_WR)
        elif way == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.close()
    engine.wait_for("vllm:num_requests_running", 0, within_s=1.0)
    assert engine.metric("vllm:kv_cache_usage_perc") == 0
    assert engine.metric("vllm:request_success_total", finished_reason="abort") - aborted == 8
    for sock in socks:
        sock.close()


def test_a_waiting_request_whose_client_leaves_is_forgotten() -> None:
    with running("--max-num-seqs", "1") as engine:
        first = long_stream(engine)
        second = socket.create_connection(("127.0.0.1", engine.port), timeout=5)
        second.sendall(post("/v1/completions", b'{"prompt":"b"}'))
        engine.wait_for("vllm:num_requests_waiting", 1)
        second.close()
        engine.wait_for("vllm:num_requests_waiting", 0, within_s=1.0)
        assert engine.metric("vllm:num_requests_running") == 1
        first.close()


def test_a_reader_that_stops_reading_is_cut_off() -> None:
    with running("--time-scale", "1000") as engine:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", engine.port))
        body = b'{"prompt":"a","max_tokens":130000,"ignore_eos":true,"stream":true}'
        sock.sendall(post("/v1/completions", body))
        engine.wait_for("vllm:num_requests_running", 1)
        engine.wait_for("vllm:num_requests_running", 0, within_s=10)
        assert engine.metric("vllm:request_success_total", finished_reason="abort") == 1
        sock.close()


# --- load ---


def test_kv_pressure_preempts_and_still_answers_all() -> None:
    with running("--kv-tokens", "400", "--max-num-seqs", "16", "--time-scale", "20") as engine:

        def ask(_: int) -> int:
            answer = engine.client.completions.create(
                model="llama-3.1-8b", prompt=[1] * 20, max_tokens=60, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            return answer.usage.completion_tokens

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(ask, range(32))) == [60] * 32
        assert engine.metric("vllm:num_preemptions_total") > 0
        assert engine.metric("vllm:num_requests_waiting") == 0


def test_the_pace_is_that_of_the_calibrated_gpu(engine: Engine) -> None:
    # 201 tokens alone on an H100 8B: a prefill and 200 decode steps of 7.0-7.1 ms, at five times the speed.
    started = time.monotonic()
    engine.client.completions.create(model="llama-3.1-8b", prompt="a", max_tokens=201, extra_body={"ignore_eos": True})
    took = time.monotonic() - started
    planned = 201 * 7.1e-3 / 5
    assert 0.95 * planned < took < planned + 0.3  # the machine may be busy


# --- faults ---


def test_cold_start() -> None:
    with running("--cold-start-s", "1.0") as engine:
        assert engine.request("GET", "/health")[0] == 503
        with pytest.raises(openai.InternalServerError, match="loading"):
            engine.client.completions.create(model="llama-3.1-8b", prompt="x", max_tokens=1)
        time.sleep(1.0)
        assert engine.request("GET", "/health")[0] == 200
        assert engine.client.completions.create(model="llama-3.1-8b", prompt="x", max_tokens=1).choices


def test_injected_errors(engine: Engine) -> None:
    engine.faults(error_rate=1, error_status=502)
    assert engine.request("POST", "/v1/completions", {"prompt": "x", "stream": True})[0] == 502


def test_refusal_over_the_queue_limit_as_vllm_does() -> None:
    with running("--max-num-queued-reqs", "2") as engine:
        first, second = long_stream(engine), long_stream(engine)
        with pytest.raises(openai.InternalServerError, match="currently busy") as refused:
            engine.client.completions.create(model="llama-3.1-8b", prompt="x")
        assert refused.value.status_code == 503
        assert "retry-after" not in refused.value.response.headers
        assert engine.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
        engine.request("POST", "/faults", {"refuse_inside_stream": True})
        status, body = engine.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
        assert status == 200
        event, done = body.decode().strip().split("\n\n")
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"
        first.close()
        second.close()


def test_a_stall_holds_tokens_back(engine: Engine) -> None:
    engine.faults(stall_s=0.5)
    started = time.monotonic()
    engine.client.completions.create(model="llama-3.1-8b", prompt="x", max_tokens=2)
    assert 0.4 < time.monotonic() - started < 1.5


def test_answers_that_break_off(engine: Engine) -> None:
    engine.faults(error_after_tokens=3)
    body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True}
    assert engine.request("POST", "/v1/completions", body)[0] == 500
    stream = engine.client.completions.create(
        model="llama-3.1-8b", prompt="x", max_tokens=9, stream=True, extra_body={"ignore_eos": True}
    )
    assert [next(stream).choices[0].text for _ in range(3)]
    with pytest.raises(openai.APIError, match="failed after 3 tokens"):
        next(stream)
    engine.wait_for("vllm:num_requests_running", 0)


def test_slow_factor(engine: Engine) -> None:
    engine.faults(slow_factor=10)
    started = time.monotonic()
    engine.client.completions.create(model="llama-3.1-8b", prompt="x", max_tokens=30, extra_body={"ignore_eos": True})
    planned = 30 * 7.1e-3 * 10 / 5
    assert 0.95 * planned < time.monotonic() - started < planned + 0.3


def test_usage_that_lies_or_is_missing(engine: Engine) -> None:
    engine.faults(usage_factor=3)
    answer = engine.client.completions.create(
        model="llama-3.1-8b", prompt=[1] * 10, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (30, 12)
    engine.faults(omit_usage=True)
    assert engine.client.completions.create(model="llama-3.1-8b", prompt="x", max_tokens=1).usage is None
    status, body = engine.request(
        "POST",
        "/v1/completions",
        {"prompt": "x", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert status == 200
    assert b"usage" not in body
    assert body.endswith(b"data: [DONE]\n\n")


def test_hanging_requests_get_no_byte(engine: Engine) -> None:
    engine.faults(hang_rate=1)
    with socket.create_connection(("127.0.0.1", engine.port), timeout=0.4) as sock:
        sock.sendall(post("/v1/completions", b'{"prompt":"x"}'))
        with pytest.raises(TimeoutError):
            sock.recv(1)
    engine.faults(hang_rate=0)
    assert engine.client.completions.create(model="llama-3.1-8b", prompt="x", max_tokens=1).choices


def test_crash_after_so_many_requests() -> None:
    with running("--crash-after", "2") as engine:
        assert engine.client.completions.create(model="llama-3.1-8b", prompt="x", max_tokens=2).choices
        with pytest.raises(openai.APIConnectionError):
            engine.client.completions.create(model="llama-3.1-8b", prompt="x", max_tokens=2)
        assert engine.process.wait(timeout=5) == 70


def test_bad_fault_settings_change_nothing(engine: Engine) -> None:
    status, body = engine.request("POST", "/faults", {"eror_rate": 1})
    assert status == 400
    assert b"eror_rate" in body
    assert engine.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


# --- the end ---


def test_sigterm_finishes_streams_and_refuses_new_requests() -> None:
    engine = Engine()
    kept = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5)
    body = json.dumps({"prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True})
    kept.request("POST", "/v1/completions", body)
    response = kept.getresponse()
    assert response.read(10)
    threading.Timer(0.1, lambda: os.kill(engine.process.pid, signal.SIGTERM)).start()
    rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert engine.process.wait(timeout=5) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", engine.port), timeout=1)
    kept.close()
    engine.stop()


def test_a_second_signal_ends_a_drain_that_waits_for_a_hanging_request() -> None:
    engine = Engine("--hang-rate", "1")
    with socket.create_connection(("127.0.0.1", engine.port), timeout=5) as sock:
        sock.sendall(post("/v1/completions", b'{"prompt":"x"}') * 2)
        time.sleep(0.2)
        engine.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            engine.process.wait(timeout=0.5)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(timeout=10) == 0  # the drain alone would take 30 s
    engine.stop()


def fails(*arguments: str) -> str:
    """Run the command, which must fail with one line; returns that line."""
    done = subprocess.run(
        [*FOREBAY, "engine", "simulated", *arguments], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2 or "listen" in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def test_mistakes_on_the_command_line_get_one_clear_line(engine: Engine) -> None:
    assert "did you mean h100-80g" in fails("--profile", "h100")
    assert "at least max_num_seqs" in fails("--max-num-seqs", "9", "--max-num-batched-tokens", "8")
    assert "means nothing to the encoder" in fails("--profile", "t4/bert-base/fp16/seq128", "--kv-tokens", "9")
    taken = fails("--port", str(engine.port))
    assert f"cannot listen on 127.0.0.1:{engine.port}" in taken
    assert "\n" not in taken


def test_profiles_are_listed() -> None:
    done = subprocess.run(
        [*FOREBAY, "engine", "simulated", "--list-profiles", "--json"], capture_output=True, check=True
    )
    rows = json.loads(done.stdout)
    assert sum(row["kind"] == "llm" for row in rows) == 21


# --- encoder ---


def test_an_encoder_serves_embeddings_one_batch_at_a_time() -> None:
    # T4, BERT-base, FP16: 71.1 ms for 64 inputs; slowed down, to stand out from the cost of HTTP.
    flags = ("--profile", "t4/bert-base/fp16/seq128", "--slow-factor", "4")
    with running(*flags) as engine:
        texts = [f"text {number}" for number in range(64)]
        batch = engine.client.embeddings.create(model="bert-base", input=texts)
        assert engine.metric("forebay_engine_busy_seconds_total") == pytest.approx(4 * 0.0711, rel=0.05)
        started = time.monotonic()
        assert engine.request("POST", "/v1/embeddings", {"input": texts})[0] == 200
        assert 0.95 * 4 * 0.0711 < time.monotonic() - started < 4 * 0.0711 + 0.3
        assert [row.index for row in batch.data] == list(range(64))
        alone = engine.client.embeddings.create(model="bert-base", input="text 5", encoding_format="float")
        assert batch.data[5].embedding == pytest.approx(alone.data[0].embedding, rel=1e-6)
        assert batch.usage.prompt_tokens == sum(2 for _ in texts)
        assert engine.metric("forebay_engine_steps_total") == 3
        assert engine.metric("forebay_engine_batch_seqs_total") == 129
        status, body = engine.request("POST", "/v1/embeddings", {"input": "text 5", "encoding_format": "base64"})
        assert status == 200
        packed = base64.b64decode(json.loads(body)["data"][0]["embedding"])
        assert list(struct.unpack(f"<{len(packed) // 4}f", packed)) == pytest.approx(alone.data[0].embedding, rel=1e-6)
        with pytest.raises(openai.BadRequestError, match="most allowed is 128"):
            engine.client.embeddings.create(model="bert-base", input=["x"] * 129)
        with pytest.raises(openai.NotFoundError, match="does not serve"):
            engine.client.completions.create(model="bert-base", prompt="x")
