"""Load for the proxies: closed loop by ``wrk``, and plain sockets where what counts is time, chunks or memory.

Everything here runs synchronously in the benchmark's own process, which does nothing else meanwhile.
"""

from __future__ import annotations

import json
import re
import select
import selectors
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.upstream import HOLD

if TYPE_CHECKING:
    from pathlib import Path

KEY: Final = "sk-bench-admitted"
LIMITED_KEY: Final = "sk-bench-over-its-limit"

_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_PROMPT: Final = (
    "You run a small hydro power plant. The turbine takes a fixed flow, the river does not deliver one. "
    "Explain to a new colleague why the plant has a forebay, how deep it should be, and what the spillway is for. "
)


class TrafficError(Exception):
    """The proxy did not answer as the measurement needs; the message says what came instead."""


def chat_body(*, stream_chunks: int | None = None, hold: bool = False) -> bytes:
    """A chat request of 1 KB; with ``stream_chunks`` one that asks for a stream of that many chunks."""
    content = (_PROMPT * 8)[:800]
    if hold:
        content = HOLD.decode() + content
    body: dict[str, object] = {
        "model": "bench",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant that answers in two short sentences."},
            {"role": "user", "content": content},
        ],
        "max_tokens": 128 if stream_chunks is None else stream_chunks,
        "temperature": 0.2,
    }
    if stream_chunks is not None:
        body["stream"] = True
    return json.dumps(body).encode()


def request_bytes(port: int, body: bytes, key: str = KEY) -> bytes:
    """The whole HTTP/1.1 request that posts ``body``."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        "content-type: application/json\r\naccept: */*\r\nuser-agent: forebay-bench\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# --- closed loop -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Burst:
    """What ``wrk`` counted: all answers, those with a status above 399, and connections that broke."""

    answers: int
    refused: int
    broken: int
    duration_s: float


_WRK_SCRIPT: Final = """
wrk.method = "POST"
wrk.body = %s
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer %s"
done = function(summary)
  local e = summary.errors
  io.write(string.format('\\n{"answers":%%d,"refused":%%d,"broken":%%d,"duration_s":%%f}\\n',
    summary.requests, e.status, e.connect + e.read + e.write + e.timeout, summary.duration / 1e6))
end
"""


def closed_loop(port: int, *, connections: int, duration_s: float, folder: Path, key: str = KEY) -> Burst:
    """Keep ``connections`` keep-alive connections busy for ``duration_s`` with the 1 KB chat request."""
    script = folder / "burst.lua"
    script.write_text(_WRK_SCRIPT % (json.dumps(chat_body().decode()), key))
    done = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(duration_s))}s", "--timeout", "10s", "-s", str(script),
         f"http://127.0.0.1:{port}/v1/chat/completions"],
        capture_output=True, text=True, timeout=duration_s + 60, check=True,
    )  # fmt: skip
    return Burst(**json.loads(done.stdout.splitlines()[-1]))


# --- one connection --------------------------------------------------------------------------------------------------


def connect(port: int) -> socket.socket:
    """A connected loopback socket that sends at once."""
    conn = socket.create_connection(("127.0.0.1", port), timeout=30)
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return conn


def _answer_end(data: bytes) -> int:
    """Where the answer at the start of ``data`` ends, or -1 when it is not complete."""
    head_end = data.find(b"\r\n\r\n")
    if head_end < 0:
        return -1
    length = _CONTENT_LENGTH.search(data, 0, head_end)
    if length is not None:
        end = head_end + 4 + int(length[1])
        return end if len(data) >= end else -1
    last = data.find(b"\r\n0\r\n\r\n", head_end)
    return last + 7 if last >= 0 else -1


def ask(conn: socket.socket, request: bytes) -> int:
    """Send one request, read its whole answer, return its status."""
    conn.sendall(request)
    answer = b""
    while _answer_end(answer) < 0:
        part = conn.recv(65536)
        if not part:
            raise TrafficError(f"the connection closed after {len(answer)} bytes of the answer: {answer[:200]!r}")
        answer += part
    return int(answer[9:12])


def serves(port: int) -> bool:
    """Whether a chat request is answered with 200 now."""
    try:
        with connect(port) as conn:
            conn.settimeout(5)
            return ask(conn, request_bytes(port, chat_body())) == 200
    except (OSError, TrafficError):
        return False


def open_idle(port: int, count: int) -> list[socket.socket]:
    """``count`` connections that each had one answer and now idle; the caller closes them."""
    request = request_bytes(port, chat_body())
    idle = []
    for _ in range(count):
        conn = connect(port)
        idle.append(conn)
        status = ask(conn, request)
        if status != 200:
            raise TrafficError(f"connection {len(idle)} of {count} was answered {status}, 200 expected")
    return idle


def open_waiting(port: int, count: int) -> list[socket.socket]:
    """``count`` connections whose request the upstream never answers; the caller closes them."""
    request = request_bytes(port, chat_body(hold=True))
    waiting = []
    for _ in range(count):
        conn = connect(port)
        conn.sendall(request)
        conn.setblocking(False)
        waiting.append(conn)
    return waiting


def answered(connections: list[socket.socket]) -> int:
    """How many of ``connections`` have bytes to read or were closed."""
    poller = select.poll()
    for conn in connections:
        poller.register(conn, select.POLLIN)
    return len(poller.poll(0))


# --- open loop at a fixed rate ---------------------------------------------------------------------------------------


def paced(port: int, *, rate_per_s: float, duration_s: float, connections: int = 32) -> list[int]:
    """Latencies in ns of requests sent at a fixed rate, each counted from its *intended* time.

    ``select`` waits here because it takes microseconds, where an event loop's timers take milliseconds. A request whose
    turn comes while all connections are busy waits for one, and that wait is part of its latency.

    Raises:
        TrafficError: an answer was not a 200, or a connection closed.
    """
    request = request_bytes(port, chat_body())
    free = [connect(port) for _ in range(connections)]
    everyone = list(free)
    for conn in free:  # both sides have their connections open before the clock starts
        ask(conn, request)
    busy: dict[socket.socket, tuple[int, bytes]] = {}
    latencies: list[int] = []
    total = int(rate_per_s * duration_s)
    interval_ns = round(1e9 / rate_per_s)
    start_ns = time.perf_counter_ns() + interval_ns
    sent = 0
    try:
        while len(latencies) < total:
            now_ns = time.perf_counter_ns()
            if sent < total and free and now_ns >= start_ns + sent * interval_ns:
                conn = free.pop()
                conn.sendall(request)
                busy[conn] = (start_ns + sent * interval_ns, b"")
                sent += 1
                continue
            wait_ns = start_ns + sent * interval_ns - now_ns if sent < total and free else 10_000_000_000
            readable, _, _ = select.select(list(busy), (), (), max(0, wait_ns) / 1e9)
            if not readable and not free:
                raise TrafficError(f"no answer for 10 s with {len(busy)} requests under way")
            for conn in readable:
                intended_ns, answer = busy[conn]
                part = conn.recv(65536)
                answer += part
                if _answer_end(answer) < 0:
                    if not part:
                        raise TrafficError("a connection closed in the middle of an answer")
                    busy[conn] = (intended_ns, answer)
                    continue
                latencies.append(time.perf_counter_ns() - intended_ns)
                if answer[9:12] != b"200":
                    raise TrafficError(f"answered {answer[9:12].decode()}, 200 expected")
                del busy[conn]
                free.append(conn)
    finally:
        for conn in everyone:
            conn.close()
    return latencies


# --- streams ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Streams:
    """What many concurrent streams delivered. ``events`` counts ``data:`` lines, the final ``[DONE]`` excluded."""

    events: int
    finished: int
    duration_s: float


def streams(port: int, *, count: int, chunks: int, limit_s: float) -> Streams:
    """Read ``count`` streams of ``chunks`` chunks each, started evenly over half a second."""
    request = request_bytes(port, chat_body(stream_chunks=chunks))
    selector = selectors.EpollSelector()
    tails: dict[socket.socket, bytes] = {}
    begin = time.perf_counter()
    starts = [begin + 0.5 * n / count for n in reversed(range(count))]
    events = finished = ended = 0
    try:
        while ended < count and (now := time.perf_counter()) - begin < limit_s:
            if starts and starts[-1] <= now:
                starts.pop()
                conn = connect(port)
                conn.sendall(request)
                selector.register(conn, selectors.EVENT_READ, conn)
                tails[conn] = b""
                continue
            for selected, _ in selector.select(max(0.0, starts[-1] - now) if starts else 1.0):
                conn = selected.data
                part = conn.recv(262144)
                tail = tails[conn]
                # A read may cut a marker in two: the end of the last read is looked at again, short of a whole marker.
                events += (tail[-4:] + part).count(b"data:")
                tails[conn] = (tail + part)[-5:]
                done = b"[DONE]" in tail + part
                if done or not part:
                    ended += 1
                    finished += done
                    selector.unregister(conn)
                    conn.close()
                    del tails[conn]
    finally:
        for conn in tails:
            conn.close()
        selector.close()
    return Streams(events - finished, finished, time.perf_counter() - begin)
