"""The article's snippets as mechanisms: the same decisions in the same order, on a clock that is passed in.

Each class does what its snippet does, faults included, so that what follows from it can be measured. Where a snippet
names something that it never defines, the class supplies the obvious meaning and says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

SNIPPET_FLAT_OUTPUT = 128
SNIPPET_TOKENS_PER_S = 12_000


@dataclass
class PushQueue:
    """`GPUQueue`: above the depth it sleeps 50 ms, then appends all the same; a batch is started by a push alone.

    Its counter of throttled clients is never set up, which fails at the first full queue; here it is.
    """

    max_depth: int = 50
    batch_max: int = 8
    queue: deque[int] = field(default_factory=deque)
    busy: bool = False
    throttled: int = 0

    def push(self, request: int) -> int:
        """Returns the delay in ms before the request was in the queue: all that the sender is slowed down by."""
        slept = 0
        if len(self.queue) >= self.max_depth:
            self.throttled += 1
            slept = 50
        self.queue.append(request)
        return slept

    def start_batch(self) -> list[int]:
        """What a push starts when the GPU is not busy."""
        self.busy = True
        return [self.queue.popleft() for _ in range(min(self.batch_max, len(self.queue)))]

    def end_batch(self) -> None:
        """The GPU is free; whoever still waits, waits for the next push."""
        self.busy = False


@dataclass
class InflightGate:
    """`InferenceGate`: a count that goes up on admission and down when the caller says so."""

    max_inflight: int = 32
    inflight: int = 0

    def admit(self) -> int:
        """The status."""
        if self.inflight >= self.max_inflight:
            return 429
        self.inflight += 1
        return 200

    def complete(self) -> None:
        """Called for a request that ended well. One that fails, or whose client leaves, is not mentioned."""
        self.inflight -= 1


@dataclass
class TokenGate:
    """`TokenAwareAdmission`: an allowance "per second" that is set once, and spent."""

    max_tokens_per_s: int = SNIPPET_TOKENS_PER_S
    available: int = field(init=False)

    def __post_init__(self) -> None:
        self.available = self.max_tokens_per_s

    @staticmethod
    def estimate(prompt_bytes: int) -> int:
        """A quarter of the length, and the same for every output. The tokenizer that it loads is not asked."""
        return max(1, prompt_bytes // 4) + SNIPPET_FLAT_OUTPUT

    def admit(self, prompt_bytes: int) -> int:
        """The status."""
        cost = self.estimate(prompt_bytes)
        if cost > self.available:
            return 429
        self.available -= cost
        return 200


@dataclass
class HybridGate:
    """`HybridInferenceGate`: tokens are charged, then the queue is asked, then the caller runs a batch itself."""

    depth: int = 20
    tokens: TokenGate = field(default_factory=TokenGate)
    queue: deque[int] = field(default_factory=deque)

    def process(self, request: int, prompt_bytes: int) -> int | list[int]:
        """A status, or what the caller gets: the results of whichever requests are in the batch that it ran."""
        if self.tokens.admit(prompt_bytes) != 200:
            return 429
        if len(self.queue) >= self.depth:
            return 503
        self.queue.append(request)
        return [self.queue.popleft() for _ in range(min(8, len(self.queue)))]


@dataclass
class DepthTuner:
    """`QueueTuner`, one turn of its endless loop at a time. The bounds given to it are not used by it."""

    depth: int = 16

    def turn(self, utilization: float, p99_ms: float) -> int:
        """The depth for the next 30 s."""
        if utilization > 0.90 and p99_ms < 200:
            self.depth = min(self.depth + 4, 64)
        if p99_ms > 500:
            self.depth = max(self.depth - 2, 4)
        return self.depth


def settle(tuner: DepthTuner, p99_of: Callable[[int], float], turns: int, utilization: float = 1.0) -> list[int]:
    """The depths of so many turns, with a p99 that follows from the depth."""
    return [tuner.turn(utilization, p99_of(tuner.depth)) for _ in range(turns)]


async def channel_calls(calls: int, capacity: int, workers: int, patience_s: float) -> dict[str, int]:
    """The Go handler, `calls` times one after the other: it sends into a buffered channel, then serves the call itself.

    `workers` take from the channel; the snippet shows none. Counts what was served by the handler, what by a worker,
    and what met its deadline. "Falls through" is Go's word for a select with a default; this one has none, and blocks.
    """
    channel: asyncio.Queue[int] = asyncio.Queue(capacity)
    counts = {"by handler": 0, "by worker": 0, "deadline": 0}

    async def work() -> None:
        while True:
            await channel.get()
            counts["by worker"] += 1

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    for number in range(calls):
        try:
            await asyncio.wait_for(channel.put(number), patience_s)
            counts["by handler"] += 1
        except TimeoutError:
            counts["deadline"] += 1
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    return counts
