"""Watches a gateway from a process of its own: `watch.py PORT STREAMS` reads streams, and polls the health path each
20 ms until they have ended; prints {"health_s": [...], "gaps_s": [...]}. Times are measured where nothing else runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

POLL_S = 0.02
STREAM = json.dumps({"model": "m", "messages": [], "stream": True}).encode()


async def stream(port: int, gaps: list[float]) -> None:
    """Read one stream; the seconds between its pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(STREAM)}\r\n\r\n".encode() + STREAM)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), "the stream was refused"
    last = 0.0
    while await reader.read(65536):
        now = time.monotonic()
        if last:
            gaps.append(now - last)
        last = now
    writer.close()


async def health(port: int, latencies: list[float], done: asyncio.Event) -> None:
    """Ask the health path over and over on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not done.is_set():
        began = time.monotonic()
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b'"ok"}')
        latencies.append(time.monotonic() - began)
        await asyncio.sleep(POLL_S)
    writer.close()


async def main(port: int, streams: int) -> None:
    gaps: list[float] = []
    latencies: list[float] = []
    done = asyncio.Event()
    polling = asyncio.create_task(health(port, latencies, done))
    await asyncio.gather(*(stream(port, gaps) for _ in range(streams)))
    done.set()
    await polling
    print(json.dumps({"health_s": latencies, "gaps_s": gaps}))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
