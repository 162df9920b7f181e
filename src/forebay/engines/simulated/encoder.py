"""A simulated GPU running an encoder: whole batches, one at a time. Pure, like `model`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.engines.simulated.profile import EncoderProfile


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch: its vectors exist at its start plus `duration_ns`."""

    duration_ns: int
    id: str
    size: int


class EncoderModel:
    """Takes batches as they come, computes them in order and never joins two: batching is the sender's business."""

    def __init__(self, profile: EncoderProfile, max_batch: int) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.profile, self.max_batch = profile, max_batch
        self.slowdown = 1.0
        self.running: BatchResult | None = None
        self._waiting: OrderedDict[str, int] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Inputs waiting, over all batches."""
        return sum(self._waiting.values())

    def submit(self, id: str, size: int, now: int) -> None:  # noqa: A002, ARG002
        """Queue a batch of `size` inputs. Raises ValueError when it is too large or the id is in use."""
        if not 1 <= size <= self.max_batch:
            raise ValueError(f"the batch has {size} inputs, the most allowed is {self.max_batch}")
        if id in self._waiting or (self.running is not None and self.running.id == id):
            raise ValueError(f"batch {id!r} is already in the engine")
        self._waiting[id] = size

    def abort(self, id: str, now: int) -> bool:  # noqa: A002, ARG002
        """Take a batch out of the queue; one that is being computed cannot be stopped. False when not queued."""
        return self._waiting.pop(id, None) is not None

    def step(self, now: int) -> BatchResult | None:  # noqa: ARG002
        """The last batch is over: compute the next one, if there is one."""
        self.running = None
        if not self._waiting:
            return None
        id, size = self._waiting.popitem(last=False)  # noqa: A001
        duration_ns = max(1, round(self.profile.batch_ms(size) * self.slowdown * 1e6))
        self.running = BatchResult(duration_ns, id, size)
        return self.running
