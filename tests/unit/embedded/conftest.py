"""A tiny random Llama with a real byte-level vocabulary, written as a GGUF file by a writer of our own."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.engines.embedded.gguf import GgufFile
from forebay.engines.embedded.model import Model, Shape, load_weights
from forebay.engines.embedded.scheduler import Sequence, Span, Want
from forebay.engines.embedded.tokenizer import Tokenizer

F32, F16, Q4_1, Q8_0, Q6_K = 0, 1, 3, 8, 14

LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, HIDDEN = 2, 4, 2, 8, 48
WIDTH = HEADS * HEAD_WIDTH
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o")

GgufBytes = bytes


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def write_gguf(metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A GGUF v3 file. `tensors` maps names to (row-major shape, type, data)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def vocabulary() -> list[str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    alphabet = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    return [*CONTROL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def tiny_metadata() -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "tokenizer.ggml.eos_token_id": 2,
    }


def tiny_arrays() -> dict[str, np.ndarray]:
    """The tiny model's weights by GGUF name, row-major, rotation in neighbouring pairs."""
    chance = np.random.default_rng(7)
    kv_width = KV_HEADS * HEAD_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(vocabulary()), WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    for index in range(LAYERS):
        for name, shape in {
            "attn_norm": (WIDTH,),
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (kv_width, WIDTH),
            "attn_v": (kv_width, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_norm": (WIDTH,),
            "ffn_gate": (HIDDEN, WIDTH),
            "ffn_up": (HIDDEN, WIDTH),
            "ffn_down": (WIDTH, HIDDEN),
        }.items():
            shapes[f"blk.{index}.{name}.weight"] = shape
    return {
        name: (chance.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def tiny_gguf() -> bytes:
    tensors = {name: (array.shape, F32, array.tobytes()) for name, array in tiny_arrays().items()}
    return write_gguf(tiny_metadata(), tensors)


class Tiny:
    """What the tests share: they make models of their own, because a model has a cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrays = tiny_arrays()
        with GgufFile(path) as file:
            self.metadata = dict(file.metadata)
            self.shape = Shape.from_gguf(file.metadata)
            self.weights = load_weights(file, self.shape)
        self.tokenizer = Tokenizer.from_gguf(self.metadata)

    def model(self, slots: int = 4, context: int = 64, threads: int = 1) -> Model:
        return Model(self.shape, self.weights, slots, context, threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("model") / "Tiny.gguf"
    path.write_bytes(tiny_gguf())
    return Tiny(path)


def span(slot: int, start: int, tokens: list[int], want: Want = Want.TOKEN) -> Span:
    return Span(Sequence(str(slot), tokens, 1, None), slot, start, tokens, want)


@pytest.fixture(name="span")
def span_fixture() -> Any:
    return span


@pytest.fixture(name="write_gguf")
def write_gguf_fixture() -> Any:
    return write_gguf
