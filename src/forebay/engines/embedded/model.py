"""The Llama architecture in NumPy, float32 throughout: one forward pass over any mix of prompts and answers.

A step takes spans of tokens from many sequences. The matrix products see all their rows at once (that is the whole
gain of batching: the weights are read from memory once per step, however many rows there are); attention is done per
span for prompts and per run of neighbouring cache slots for sequences that generate.

Activations are kept feature-major, [features, rows], and weights as [out, in]: for the few rows of a step, BLAS is
faster on `weights @ activations` than on the transposed product.
"""

from __future__ import annotations

import functools
import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from forebay.engines.embedded.parallel import Linear, Team
from forebay.engines.embedded.scheduler import Want
from forebay.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from forebay.engines.embedded.gguf import GgufFile
    from forebay.engines.embedded.scheduler import Span

    Floats = npt.NDArray[np.float32]
    Ints = npt.NDArray[np.intp]

_BRIDGED_SLOTS: Final = 3
"""Unused slots that attention computes in vain rather than to start another run of slots."""

_SHARED_POSITIONS: Final = 1024
"""Cached positions from which a run's attention is shared between threads."""

_MASKED: Final = np.float32(-1e30)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int
    norm_epsilon: float
    rope_base: float
    trained_context: int

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Shape:
        """Raises EngineError when the file describes another architecture, or sizes that do not fit together."""
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise EngineError(f"the model file is of architecture {architecture!r}; the embedded engine runs 'llama'")

        def number(key: str, default: float | None = None) -> Any:
            value = metadata.get(f"llama.{key}", default)
            if not isinstance(value, (int, float)) or not 0 < value < 2**31:
                raise EngineError(f"the model file has llama.{key} = {value!r}, a positive number is needed")
            return value

        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise EngineError("the model file has no vocabulary (tokenizer.ggml.tokens)")
        heads, width = int(number("attention.head_count")), int(number("embedding_length"))
        shape = cls(
            layers=int(number("block_count")),
            width=width,
            heads=heads,
            kv_heads=int(number("attention.head_count_kv", heads)),
            head_width=int(number("rope.dimension_count", width // heads)),
            hidden=int(number("feed_forward_length")),
            vocabulary=len(tokens),
            norm_epsilon=float(number("attention.layer_norm_rms_epsilon")),
            rope_base=float(number("rope.freq_base", 10_000.0)),
            trained_context=int(number("context_length")),
        )
        if shape.heads % shape.kv_heads or shape.heads * shape.head_width != width or shape.head_width % 2:
            raise EngineError(
                f"the model file's sizes do not fit together: width {width}, {heads} heads of {shape.head_width}, "
                f"{shape.kv_heads} for keys and values"
            )
        return shape


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block, [out, in]. Queries are scaled and rotation halves regrouped when they are loaded."""

    attention_norm: Floats
    query_key_value: Floats
    attention_out: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Floats
    """[vocabulary, width]"""
    layers: list[Layer]
    norm: Floats
    output: Floats
    """[vocabulary, width]; the embedding itself when the model ties them."""


def load_weights(file: GgufFile, shape: Shape) -> Weights:
    """All weights as float32, fused where products share their input; nothing else of the file stays in memory.

    Raises:
        EngineError: a tensor is missing or has the wrong shape.
    """
    width, vocabulary = shape.width, shape.vocabulary
    embedding = file.tensor("token_embd.weight", (vocabulary, width))
    tied = "output.weight" not in file.tensors
    return Weights(
        embedding=embedding,
        layers=[_load_layer(file, shape, index) for index in range(shape.layers)],
        norm=file.tensor("output_norm.weight", (width,))[:, None],
        output=embedding if tied else file.tensor("output.weight", (vocabulary, width)),
    )


def _load_layer(file: GgufFile, shape: Shape, index: int) -> Layer:
    width, kv_width = shape.width, shape.kv_heads * shape.head_width

    def tensor(name: str, *sizes: int) -> Floats:
        return file.tensor(f"blk.{index}.{name}.weight", sizes)

    query_key_value = np.empty((width + 2 * kv_width, width), np.float32)
    query_key_value[:width] = _regroup(tensor("attn_q", width, width), shape.heads)
    query_key_value[:width] *= np.float32(1 / math.sqrt(shape.head_width))
    query_key_value[width : width + kv_width] = _regroup(tensor("attn_k", kv_width, width), shape.kv_heads)
    query_key_value[width + kv_width :] = tensor("attn_v", kv_width, width)
    gate_up = np.empty((2 * shape.hidden, width), np.float32)
    gate_up[: shape.hidden] = tensor("ffn_gate", shape.hidden, width)
    gate_up[shape.hidden :] = tensor("ffn_up", shape.hidden, width)
    return Layer(
        attention_norm=tensor("attn_norm", width)[:, None],
        query_key_value=query_key_value,
        attention_out=tensor("attn_output", width, width),
        mlp_norm=tensor("ffn_norm", width)[:, None],
        gate_up=gate_up,
        down=tensor("ffn_down", width, shape.hidden),
    )


def _regroup(weights: Floats, heads: int) -> Floats:
    """GGUF files rotate neighbouring pairs; grouped into halves the rotation works on contiguous memory instead.

    Queries and keys are reordered alike, so their products stay the same.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits` is [vocabulary, spans that want a token]; `sums` the summed final states, [width], per wanted vector."""

    logits: Floats
    sums: list[Floats]


@dataclass(frozen=True, slots=True)
class _Run:
    """Generating sequences in neighbouring cache slots, attended to in one go."""

    rows: Ints
    first_slot: int
    end_slot: int
    length: int
    """Positions that the longest of them has."""
    mask: Floats
    """[slots of the run, 1, 1, length], 0 or very negative."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt's chunk: its columns, slot and causal mask, [chunk, positions]."""

    columns: slice
    slot: int
    length: int
    mask: Floats


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers share in a step."""

    slots: Ints
    positions: Ints
    cosine: Floats
    """[head_width / 2, rows]"""
    sine: Floats
    runs: list[_Run]
    prompts: list[_Prompt]


class Model:
    """Weights and a KV cache of `slots` sequences of `context` positions.

    The cache is virtual memory until positions are written, so resident memory follows what sequences really use:
    at most slots x context x 2 x layers x kv_heads x head_width x 4 bytes (45 KiB per token for SmolLM2-135M).
    """

    def __init__(self, shape: Shape, weights: Weights, slots: int, context: int, threads: int = 1) -> None:
        self.shape, self.weights, self.slots, self.context = shape, weights, slots, context
        cache_shape = (shape.layers, slots, shape.kv_heads, context, shape.head_width)
        self._keys = _lazy_zeros(cache_shape)
        self._values = _lazy_zeros(cache_shape)
        half = np.arange(0, shape.head_width, 2, dtype=np.float64) / shape.head_width
        angles = np.outer(1.0 / shape.rope_base**half, np.arange(context))
        self._cosine, self._sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._epsilon = np.float32(shape.norm_epsilon)
        self._team = Team(threads)
        self._linear = Linear(self._team, weights.layers[0].gate_up)

    def close(self) -> None:
        self._team.close()

    def forward(self, spans: Sequence[Span]) -> StepResult:
        """Runs the spans through the model and into the cache.

        A span's tokens must be in the vocabulary and its positions within the context.
        """
        tokens = [token for span in spans for token in span.tokens]
        step = self._prepare(spans)
        state = np.ascontiguousarray(self.weights.embedding[tokens].T)
        linear = self._linear
        with np.errstate(over="ignore"):  # exp of a very negative gate: the quotient is 0, as it should be
            for index, layer in enumerate(self.weights.layers):
                mixed = linear(layer.query_key_value, self._normed(state, layer.attention_norm))
                state += linear(layer.attention_out, self._attention(index, mixed, step))
                gate_up = linear(layer.gate_up, self._normed(state, layer.mlp_norm))
                state += linear(layer.down, _swiglu(gate_up))
        return self._result(spans, state)

    def _result(self, spans: Sequence[Span], state: Floats) -> StepResult:
        ends = np.cumsum([len(span.tokens) for span in spans])
        wanting = [int(end) - 1 for span, end in zip(spans, ends, strict=True) if span.want is Want.TOKEN]
        sums = []
        for span, end in zip(spans, ends, strict=True):
            if span.want is Want.VECTOR:
                own = np.ascontiguousarray(state[:, int(end) - len(span.tokens) : int(end)])
                sums.append(self._normed(own, self.weights.norm).sum(axis=1))
        if not wanting:
            return StepResult(np.empty((self.shape.vocabulary, 0), np.float32), sums)
        last = self._normed(np.ascontiguousarray(state[:, wanting]), self.weights.norm)
        return StepResult(self._linear(self.weights.output, last), sums)

    def _normed(self, state: Floats, weight: Floats) -> Floats:
        """RMS norm over the features."""
        scale = np.einsum("ij,ij->j", state, state)
        scale *= np.float32(1 / len(state))
        scale += self._epsilon
        np.sqrt(scale, out=scale)
        np.reciprocal(scale, out=scale)
        normed: Floats = state * scale
        normed *= weight
        return normed

    def _prepare(self, spans: Sequence[Span]) -> _Step:
        slots = np.repeat([span.slot for span in spans], [len(span.tokens) for span in spans])
        positions = np.concatenate([np.arange(span.start, span.start + len(span.tokens)) for span in spans])
        single: list[tuple[int, int]] = []
        prompts = []
        row = 0
        for span in spans:
            count = len(span.tokens)
            if count == 1:
                single.append((span.slot, row))
            else:
                length = span.start + count
                mask = np.triu(np.full((count, length), _MASKED, np.float32), span.start + 1)
                prompts.append(_Prompt(slice(row, row + count), span.slot, length, mask))
            row += count
        return _Step(
            slots=slots,
            positions=positions,
            cosine=self._cosine[:, positions],
            sine=self._sine[:, positions],
            runs=_runs(sorted(single), positions, self._team.size),
            prompts=prompts,
        )

    def _attention(self, index: int, mixed: Floats, step: _Step) -> Floats:
        """Attends with a layer's queries, keys and values, [.., rows], and gives [width, rows]."""
        shape = self.shape
        rows = mixed.shape[1]
        split = shape.width + shape.kv_heads * shape.head_width
        rotated = _rotate(mixed[:split].reshape(-1, shape.head_width, rows), step.cosine, step.sine)
        # Row-major from here: the cache is by position, and so is what attention reads and writes.
        by_row = rotated.transpose(2, 0, 1)
        queries = np.ascontiguousarray(by_row[:, : shape.heads])
        queries = queries.reshape(rows, shape.kv_heads, -1, shape.head_width)
        keys, values = self._keys[index], self._values[index]
        keys[step.slots, :, step.positions] = by_row[:, shape.heads :]
        values[step.slots, :, step.positions] = mixed[split:].reshape(shape.kv_heads, -1, rows).transpose(2, 0, 1)
        out = np.empty((rows, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_width), np.float32)
        if len(step.runs) > 1 and self._team.size > 1:
            self._attend_shared(step, queries, keys, values, out)
        else:
            for run in step.runs:
                _attend_run(run, queries, keys, values, step.slots, out)
        for prompt in step.prompts:
            _attend_prompt(prompt, queries, keys, values, out)
        return np.ascontiguousarray(out.reshape(rows, shape.width).T)

    def _attend_shared(self, step: _Step, queries: Floats, keys: Floats, values: Floats, out: Floats) -> None:
        for start in range(0, len(step.runs), self._team.size):
            self._team.share(
                [
                    functools.partial(_attend_run, run, queries, keys, values, step.slots, out)
                    for run in step.runs[start : start + self._team.size]
                ]
            )


def _attend_run(run: _Run, queries: Floats, keys: Floats, values: Floats, slots: Ints, out: Floats) -> None:
    """One token each of several sequences, over slices of the cache: nothing of it is copied."""
    span, length = slice(run.first_slot, run.end_slot), run.length
    count = run.end_slot - run.first_slot
    if len(run.rows) == count:
        asked = queries[run.rows]
    else:
        asked = np.zeros((count, *queries.shape[1:]), np.float32)
        asked[slots[run.rows] - run.first_slot] = queries[run.rows]
    scores = asked @ keys[span, :, :length].swapaxes(-1, -2)
    scores += run.mask
    found = _softmax(scores) @ values[span, :, :length]
    out[run.rows] = found[slots[run.rows] - run.first_slot]


def _attend_prompt(prompt: _Prompt, queries: Floats, keys: Floats, values: Floats, out: Floats) -> None:
    """A chunk of one sequence, over all of its positions so far."""
    own = queries[prompt.columns].transpose(1, 2, 0, 3)
    scores = own @ keys[prompt.slot, :, None, : prompt.length].swapaxes(-1, -2)
    scores += prompt.mask
    found = _softmax(scores) @ values[prompt.slot, :, None, : prompt.length]
    out[prompt.columns] = found.transpose(2, 0, 1, 3)


def _runs(single: list[tuple[int, int]], positions: Ints, threads: int) -> list[_Run]:
    """Groups (slot, row) pairs, sorted by slot, into runs of slots with small gaps at most.

    Where there is much to attend to, there are at least as many runs as threads to share them.
    """
    groups: list[list[tuple[int, int]]] = []
    most = len(single)
    if sum(int(positions[row]) + 1 for _, row in single) >= _SHARED_POSITIONS:
        most = -(-most // threads)
    for slot, row in single:
        if groups and len(groups[-1]) < most and slot - groups[-1][-1][0] <= _BRIDGED_SLOTS + 1:
            groups[-1].append((slot, row))
        else:
            groups.append([(slot, row)])
    runs = []
    for group in groups:
        rows = np.array([row for _, row in group])
        first, end = group[0][0], group[-1][0] + 1
        last = np.full(end - first, -1)
        last[[slot - first for slot, _ in group]] = positions[rows]
        length = int(last.max()) + 1
        # A slot that is bridged attends to its first position, whatever is there: its result is never read.
        last = np.maximum(last, 0)
        mask = np.where(np.arange(length) <= last[:, None], np.float32(0), _MASKED)[:, None, None]
        runs.append(_Run(rows, first, end, length, mask))
    return runs


def _rotate(heads: Floats, cosine: Floats, sine: Floats) -> Floats:
    """Rotary position embedding of [heads, head_width, rows]."""
    middle = heads.shape[1] // 2
    first, second = heads[:, :middle], heads[:, middle:]
    out = np.empty_like(heads)
    np.multiply(first, cosine, out=out[:, :middle])
    out[:, :middle] -= second * sine
    np.multiply(second, cosine, out=out[:, middle:])
    out[:, middle:] += first * sine
    return out


def _softmax(scores: Floats) -> Floats:
    """Over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _swiglu(gate_up: Floats) -> Floats:
    middle = len(gate_up) // 2
    gate = gate_up[:middle]
    sigmoid: Floats = np.exp(-gate)
    sigmoid += np.float32(1)
    np.divide(gate, sigmoid, out=sigmoid)
    sigmoid *= gate_up[middle:]
    return sigmoid


def _lazy_zeros(shape: tuple[int, ...]) -> Floats:
    """Zeros that take memory page by page as they are written; huge pages would commit the whole cache at once."""
    pages = mmap.mmap(-1, max(1, math.prod(shape) * 4))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages has none to refuse
    return np.frombuffer(pages, np.float32).reshape(shape)
