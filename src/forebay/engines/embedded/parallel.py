"""Matrix products of a few rows over several threads.

The engine pins BLAS to one thread and divides the work itself, for two reasons. A product of few rows is bound by
reading the weights, and BLAS makes it worse by first copying them into a packed layout, unless the product is so small
that packing cannot pay: a large matrix is therefore multiplied as a stack of small ones. And BLAS with threads of its
own serves one caller at a time, so that two threads of ours would wait for each other.
"""

from __future__ import annotations

import itertools
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Task = Callable[[], object]

_UNPACKED_MULTIPLICATIONS: Final = 1_000_000
"""OpenBLAS multiplies without packing up to this many (M x N x K)."""

_BLOCKS: Final = (64, 32, 16)
_TRIALS: Final = 4


class Team:
    """Threads that share the tasks of one caller. Not for several callers at once."""

    def __init__(self, threads: int) -> None:
        self.size = max(1, threads)
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._inboxes: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in range(self.size - 1)]
        for inbox in self._inboxes:
            threading.Thread(target=self._work, args=(inbox,), name="forebay-embedded-blas", daemon=True).start()

    def share(self, tasks: Sequence[Task]) -> None:
        """Runs up to `size` tasks at once, the first in the caller's thread; raises what one of them raised."""
        helped = tasks[1:]
        assert len(helped) < self.size, "a task more than threads would never run"
        for inbox, task in zip(self._inboxes, helped, strict=False):
            inbox.put(task)
        failure: BaseException | None = None
        try:
            tasks[0]()
        finally:
            for _ in helped:
                failure = self._done.get() or failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)

    def _work(self, inbox: SimpleQueue[Task | None]) -> None:
        while (task := inbox.get()) is not None:
            failure: BaseException | None = None
            try:
                task()
            except BaseException as error:
                failure = error
            self._done.put(failure)


class Linear:
    """Products of weights, [out, in], and a step's activations, [in, rows].

    Args:
        team: who shares the work.
        sample: some large weight matrix, to find out whether stacking pays with this BLAS on this CPU.
    """

    def __init__(self, team: Team, sample: Floats) -> None:
        self._team = team
        self._stacks = True
        self._stacks = self._stacking_pays(sample)

    def __call__(self, weights: Floats, activations: Floats) -> Floats:
        """[out, rows], contiguous."""
        size, rows = len(weights), activations.shape[1]
        out = np.empty((size, rows), np.float32)
        block = self._block(weights.shape[1], rows)
        unit = block or 1
        if size % unit:
            block, unit = 0, 1
        # Borders on whole blocks, as even as that allows.
        borders = [size // unit * part // self._team.size * unit for part in range(self._team.size + 1)]
        if self._team.size == 1:
            _multiply(weights, activations, out, block)
        else:
            self._team.share(
                [
                    _Product(weights[start:end], activations, out[start:end], block)
                    for start, end in itertools.pairwise(borders)
                ]
            )
        return out

    def _block(self, width: int, rows: int) -> int:
        """Rows of weights per product of the stack; 0 for one plain product."""
        if rows == 1 or not self._stacks:
            return 0
        return next((block for block in _BLOCKS if block * width * rows <= _UNPACKED_MULTIPLICATIONS), 0)

    def _stacking_pays(self, sample: Floats) -> bool:
        """Older CPUs have no products without packing in their BLAS: there a plain product is faster."""
        activations = np.ones((sample.shape[1], 8), np.float32)
        block = self._block(sample.shape[1], 8)
        if not block or len(sample) % block:
            return False
        out = np.empty((len(sample), 8), np.float32)
        best = {}
        for each in (0, block):
            taken = []
            for _ in range(_TRIALS):
                began = time.perf_counter()
                _multiply(sample, activations, out, each)
                taken.append(time.perf_counter() - began)
            best[each] = min(taken)
        return best[block] < best[0]


class _Product:
    """One thread's part of a product."""

    __slots__ = ("_arguments",)

    def __init__(self, weights: Floats, activations: Floats, out: Floats, block: int) -> None:
        self._arguments = (weights, activations, out, block)

    def __call__(self) -> None:
        _multiply(*self._arguments)


def _multiply(weights: Floats, activations: Floats, out: Floats, block: int) -> None:
    if block:
        stack = weights.reshape(-1, block, weights.shape[1])
        np.matmul(stack, activations, out=out.reshape(len(stack), block, -1))
    elif activations.shape[1] == 1:
        np.matmul(weights, activations[:, 0], out=out[:, 0])
    else:
        np.matmul(weights, activations, out=out)
