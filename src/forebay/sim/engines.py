"""Simulated engines on the event heap: the calibrated models, their faults, and what is counted of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from forebay.core.instant import Instant
from forebay.core.model import Lease
from forebay.core.outcome import FailReason
from forebay.engines.simulated.encoder import EncoderModel
from forebay.engines.simulated.model import EngineModel
from forebay.engines.simulated.stretch import Stretch
from forebay.sim.call import Call, Front
from forebay.sim.world import STEP, Time

IDLE: Instant = -1


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine has done up to an instant. Times in ns; `kv_token_ns` is the integral of the KV tokens in use."""

    busy_ns: int = 0
    steps: int = 0
    batch_seqs: int = 0  # summed over steps
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_token_ns: int = 0

    def since(self, earlier: Work) -> Work:
        """What was done after `earlier`."""
        return Work(*(getattr(self, name) - getattr(earlier, name) for name in Work.__slots__))

    def plus(self, other: Work) -> Work:
        """Both together."""
        return Work(*(getattr(self, name) + getattr(other, name) for name in Work.__slots__))


class SimulatedEngine(ABC):
    """What all kinds of engine share: whether they are there, stalls, and what they say of usage."""

    def __init__(self, world: Time, name: str) -> None:
        self.name = name
        self.usage_factor = 1.0
        self.leaps = 0
        """Times that a model was asked for what comes next; one leap may be many steps."""
        self._world = world
        self._reachable = True
        self._ready = True
        self._stalled = False
        self._stalled_until: Instant = 0
        self._due: Instant = IDLE

    @property
    def answers(self) -> bool:
        """Is it there, and ready?"""
        return self._reachable and self._ready

    # ---- work ------------------------------------------------------------------------------------------------

    def start(self, calls: Sequence[Call]) -> None:
        """Work on these calls, which were dispatched together. A dispatch is never answered while it is carried out."""
        if not self._reachable:
            self._soon(calls, lambda call: _front(call).undelivered(call))
        elif not self._ready:
            self._soon(calls, lambda call: _front(call).failed(call, FailReason.ENGINE_ERROR, 0, blame=False))
        else:
            self._take(calls)
            if self._stalled:
                for call in calls:
                    _front(call).stalled(call, self._stalled_until)

    @abstractmethod
    def abort(self, call: Call) -> None:
        """Stop working on it, and free what it used."""

    @abstractmethod
    def made(self, call: Call) -> int:
        """Output tokens that exist of it by now."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """A number that stays the same while streams that have begun make nothing."""

    @abstractmethod
    def count(self, leases: Iterable[Lease]) -> None:
        """Set `generated` of leases whose calls it works on: the tokens that clients of streams have."""

    @abstractmethod
    def work(self) -> Work:
        """What was done up to now."""

    @abstractmethod
    def calls(self) -> list[Call]:
        """What it works on or keeps waiting."""

    @property
    def held(self) -> int:
        """How many calls it works on or keeps waiting."""
        return len(self.calls())

    # ---- faults ----------------------------------------------------------------------------------------------

    @abstractmethod
    def slow_down(self, factor: float) -> None:
        """Steps that begin from now on take `factor` times as long."""

    def stall(self, until: Instant) -> None:
        """Begin no step until `go_on`, which comes at that instant."""
        self._stalled, self._stalled_until = True, until
        self._cut()
        for call in self.calls():
            _front(call).stalled(call, until)

    def go_on(self) -> None:
        """The stall is over."""
        self._stalled = False
        if self._due == IDLE and self.held:
            self._begin()

    def fall(self, *, reachable: bool) -> None:
        """The process is gone, with everything it held. `reachable`: another one answers that it is warming up."""
        calls = self._lose_all()
        self._reachable, self._ready = reachable, False
        self._due = IDLE
        for call, made in calls:
            _front(call).failed(call, FailReason.ENGINE_ERROR, made, blame=True)

    def rise(self) -> None:
        """It is there again, and empty."""
        self._reachable = self._ready = True

    # ---- of the kinds ----------------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, calls: Sequence[Call]) -> None:
        """Put these calls to the model."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin what comes next, if there is anything."""

    @abstractmethod
    def _cut(self) -> None:
        """Let the step under way be the last for now."""

    @abstractmethod
    def _lose_all(self) -> list[tuple[Call, int]]:
        """Forget everything. Returns what was held, with the tokens that were made of each."""

    def _reported(self, tokens: int) -> int:
        return tokens if self.usage_factor == 1.0 else round(tokens * self.usage_factor)

    def _soon(self, calls: Sequence[Call], tell: Callable[[Call], None]) -> None:
        """Tell the front of each in an event of its own: a dispatch is never answered while it is carried out."""
        for call in calls:
            lease = call.lease
            self._world.at(self._world.now, partial(_tell_if_current, call, lease, tell))


def _front(call: Call) -> Front:
    assert call.front is not None
    return call.front


def _tell_if_current(call: Call, lease: object, tell: Callable[[Call], None]) -> None:
    if not call.done and call.lease is lease:
        tell(call)


class LanguageEngine(SimulatedEngine):
    """Continuous batching. One timer at the end of the stretch of steps under way."""

    def __init__(self, world: Time, name: str, make: Callable[[], EngineModel], *, reuses: bool = False) -> None:
        """`make` gives a model as after a start; `reuses`: it has a prefix cache."""
        super().__init__(world, name)
        self._make = make
        self._reuses = reuses
        self._model = make()
        self._calls: dict[str, Call] = {}
        self._names = 0
        self._stretch: Stretch | None = None  # under way
        self._turning = False
        self._kv_tokens = 0  # in use at the start of the stretch
        self._busy_ns = self._steps = self._batch_seqs = 0
        self._prompt_tokens = self._output_tokens = self._kv_token_ns = 0
        self._turn_action = self._turn

    def calls(self) -> list[Call]:
        return list(self._calls.values())

    @property
    def model(self) -> EngineModel:
        """The model, to look at."""
        return self._model

    def abort(self, call: Call) -> None:
        if self._calls.pop(call.name, None) is not None:
            self._output_tokens += self.made(call)
            self._model.abort(call.name, self._world.now)
            self._follow()

    def made(self, call: Call) -> int:
        if call.joined < 0:
            return 0
        return min(call.output_tokens, 1 + self._steps + self._steps_over() - call.joined)

    @property
    def progress(self) -> int:
        return self._steps + self._steps_over()

    def count(self, leases: Iterable[Lease]) -> None:
        steps = 1 + self.progress
        for lease in leases:
            call: Call = lease.ticket.request.owner
            if call.first_token:
                made = steps - call.joined
                lease.generated = made if made < call.output_tokens else call.output_tokens

    def work(self) -> Work:
        busy, seqs, kv, over = self._busy_ns, self._batch_seqs, self._kv_token_ns, self._steps_over()
        stretch = self._stretch
        if stretch is not None:
            took = self._world.now - stretch.start
            busy += took
            seqs += over * stretch.batch_seqs
            kv += took * (self._kv_tokens + stretch.batch_seqs * over // 2)
        return Work(busy, self._steps + over, seqs, self._prompt_tokens, self._output_tokens, kv)

    def slow_down(self, factor: float) -> None:
        self._cut()
        self._model.slowdown = factor

    def _steps_over(self) -> int:
        """Of the stretch under way."""
        stretch = self._stretch
        if stretch is None:
            return 0
        now = self._world.now
        return stretch.steps if now >= self._due else stretch.begun(now) - 1

    def _take(self, calls: Sequence[Call]) -> None:
        model, now = self._model, self._world.now
        for call in calls:
            self._names += 1
            name = call.name = str(self._names)
            try:
                if self._reuses:
                    cached, session = call.prefix_tokens, call.session
                    model.submit(
                        name, call.prompt_tokens, call.output_tokens, now, cached_tokens=cached, session=session
                    )
                else:
                    model.submit(name, call.prompt_tokens, call.output_tokens, now)
            except ValueError:
                self._soon((call,), lambda one: _front(one).unfit(one))
                continue
            self._calls[name] = call
        if self._due != IDLE:
            self._follow()
        elif not self._stalled and self._calls:
            self._due = now
            self._world.at(now, self._turn_action, STEP)

    def _follow(self) -> None:
        """The stretch under way may end earlier now."""
        stretch = self._stretch
        if stretch is None or self._turning:
            return
        end = stretch.end
        if end != self._due:
            self._due = end
            self._world.at(end, self._turn_action)

    def _cut(self) -> None:
        self._model.cut(self._world.now)
        self._follow()

    def _turn(self) -> None:
        """A stretch is over, or an idle engine has work: hand out what was made, and begin the next one."""
        if self._due != self._world.now:
            return  # an outdated timer
        stretch = self._stretch
        if stretch is not None:
            self._turning = True
            self._conclude(stretch)
            self._turning = False
        if self._stalled:
            self._due = IDLE
        else:
            self._begin()

    def _conclude(self, stretch: Stretch) -> None:
        steps, took = stretch.steps, self._due - stretch.start
        self._busy_ns += took
        self._steps += steps
        self._batch_seqs += steps * stretch.batch_seqs
        self._kv_token_ns += took * (self._kv_tokens + stretch.batch_seqs * (steps - 1) // 2)
        self._stretch = None
        calls = self._calls
        for name in stretch.first:
            call = calls[name]
            call.joined = self._steps
            _front(call).first_token(call)
        for name in stretch.finished:
            call = calls.pop(name)
            self._prompt_tokens += call.prompt_tokens
            self._output_tokens += call.output_tokens
            _front(call).finished(call, self._reported(call.prompt_tokens), self._reported(call.output_tokens))

    def _begin(self) -> None:
        self._stretch = stretch = self._model.leap(self._world.now)
        if stretch is None:
            self._due = IDLE
            return
        self.leaps += 1
        self._kv_tokens = self._model.kv_used
        self._due = stretch.end
        self._world.at(self._due, self._turn_action)

    def _lose_all(self) -> list[tuple[Call, int]]:
        lost = [(call, self.made(call)) for call in self._calls.values()]
        if self._stretch is not None:
            self._busy_ns += self._world.now - self._stretch.start
        self._output_tokens += sum(made for _, made in lost)
        slowdown = self._model.slowdown
        self._model = self._make()
        self._model.slowdown = slowdown
        self._stretch = None
        self._calls = {}
        return lost


@dataclass(slots=True)
class _Batch:
    name: str
    calls: list[Call]


class EncoderEngine(SimulatedEngine):
    """Whole batches, one at a time, in the order in which they came.

    `joins`: what waits is joined to batches of up to the model's largest, as servers with a batcher of their own do;
    otherwise a batch is what was dispatched together.
    """

    def __init__(self, world: Time, name: str, model: EncoderModel, *, joins: bool) -> None:
        super().__init__(world, name)
        self._model = model
        self._joins = joins
        self._waiting: deque[_Batch] = deque()
        self._running: _Batch | None = None
        self._started: Instant = 0
        self._names = 0
        self._busy_ns = self._batches = self._inputs = self._prompt_tokens = 0
        self._turn_action = self._turn

    def calls(self) -> list[Call]:
        batches = [*([self._running] if self._running is not None else []), *self._waiting]
        return [call for batch in batches for call in batch.calls]

    def abort(self, call: Call) -> None:
        for batch in self._waiting:
            if call in batch.calls:
                batch.calls.remove(call)
                return
        if self._running is not None and call in self._running.calls:
            self._running.calls.remove(call)  # the batch runs to its end whoever has left

    def made(self, call: Call) -> int:  # noqa: ARG002
        return 0

    @property
    def progress(self) -> int:
        return 0

    def count(self, leases: Iterable[Lease]) -> None:
        """It streams nothing."""

    def work(self) -> Work:
        running = self._world.now - self._started if self._running is not None else 0
        return Work(self._busy_ns + running, self._batches, self._inputs, self._prompt_tokens)

    def slow_down(self, factor: float) -> None:
        self._model.slowdown = factor

    def _take(self, calls: Sequence[Call]) -> None:
        most = self._model.max_batch
        for start in range(0, len(calls), most):
            self._names += 1
            self._waiting.append(_Batch(str(self._names), list(calls[start : start + most])))
        if self._due == IDLE and not self._stalled:
            self._due = self._world.now
            self._world.at(self._due, self._turn_action, STEP)

    def _turn(self) -> None:
        if self._due != self._world.now:
            return
        batch, self._running = self._running, None
        if batch is not None:
            self._busy_ns += self._due - self._started
            for call in batch.calls:
                self._prompt_tokens += call.prompt_tokens
                _front(call).finished(call, self._reported(call.prompt_tokens), 0)
        if self._stalled:
            self._due = IDLE
        else:
            self._begin()

    def _begin(self) -> None:
        now, batch = self._world.now, self._next()
        if batch is None:
            self._due = IDLE
            return
        self.leaps += 1
        size = len(batch.calls)
        self._model.submit(batch.name, size, now)
        result = self._model.step(now)
        assert result is not None
        self._running, self._started = batch, now
        self._batches += 1
        self._inputs += size
        self._due = now + result.duration_ns
        self._world.at(self._due, self._turn_action)

    def _next(self) -> _Batch | None:
        """The batch to compute now. Batches that everybody left are skipped."""
        waiting = self._waiting
        batch: _Batch | None = None
        while waiting:
            first = waiting[0]
            if batch is None:
                batch = first if first.calls else None
            elif self._joins and len(batch.calls) + len(first.calls) <= self._model.max_batch:
                batch.calls += first.calls
            else:
                break
            waiting.popleft()
        return batch

    def _cut(self) -> None:
        """A batch cannot be cut."""

    def _lose_all(self) -> list[tuple[Call, int]]:
        calls = self.calls()
        if self._running is not None:
            self._busy_ns += self._world.now - self._started
        self._running = None
        self._waiting.clear()
        return [(call, 0) for call in calls]
