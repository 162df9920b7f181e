"""The GGUF reader: every encoding against a plain reference, and no way to crash it."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.engines.embedded.gguf import GgufFile
from forebay.errors import EngineError

F32, F16, Q4_1, Q8_0, Q6_K = 0, 1, 3, 8, 14


def _read(path: Path, name: str = "t") -> np.ndarray:
    with GgufFile(path) as file:
        return file.tensor(name)


def _half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def _q4_1(raw: bytes) -> list[float]:
    """The format's definition, value by value."""
    values: list[float] = []
    for at in range(0, len(raw), 20):
        scale, least, nibbles = _half(raw[at : at + 2]), _half(raw[at + 2 : at + 4]), raw[at + 4 : at + 20]
        values += [(byte & 15) * scale + least for byte in nibbles]
        values += [(byte >> 4) * scale + least for byte in nibbles]
    return values


def _q8_0(raw: bytes) -> list[float]:
    values: list[float] = []
    for at in range(0, len(raw), 34):
        scale = _half(raw[at : at + 2])
        values += [scale * value for value in struct.unpack("<32b", raw[at + 2 : at + 34])]
    return values


def _q6_k(raw: bytes) -> list[float]:
    values: list[float] = []
    for at in range(0, len(raw), 210):
        low, high = raw[at : at + 128], raw[at + 128 : at + 192]
        scales, scale = struct.unpack("<16b", raw[at + 192 : at + 208]), _half(raw[at + 208 : at + 210])
        for index in range(256):
            half, quarter, column = index // 128, index % 128 // 32, index % 32
            byte = low[half * 64 + (quarter & 1) * 32 + column]
            nibble = byte >> 4 if quarter >= 2 else byte & 15
            pair = (high[half * 32 + column] >> (2 * quarter)) & 3
            values.append(scale * scales[index // 16] * ((nibble | pair << 4) - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "block", "halves", "reference"),
    [(Q4_1, 20, (0, 2), _q4_1), (Q8_0, 34, (0,), _q8_0), (Q6_K, 210, (208,), _q6_k)],
)
def test_a_quantised_tensor_has_the_values_of_its_format(
    tmp_path: Path, write_gguf: Any, kind: int, block: int, halves: tuple[int, ...], reference: Any
) -> None:
    chance = random.Random(kind)
    raw = bytearray(chance.randbytes(block * 6))
    for start in range(0, len(raw), block):
        for half in halves:
            raw[start + half : start + half + 2] = struct.pack("<e", chance.uniform(-2, 2))
    expected = reference(bytes(raw))
    path = tmp_path / "m.gguf"
    path.write_bytes(write_gguf({}, {"t": ((3, len(expected) // 3), kind, bytes(raw))}))
    tensor = _read(path)
    assert tensor.dtype == np.float32
    assert tensor.shape == (3, len(expected) // 3)
    np.testing.assert_allclose(tensor.ravel(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [(F32, "<f4"), (F16, "<f2")])
def test_a_plain_tensor_is_read_as_float32(tmp_path: Path, write_gguf: Any, kind: int, dtype: str) -> None:
    values = np.arange(12, dtype=dtype).reshape(3, 4) / 4
    path = tmp_path / "m.gguf"
    path.write_bytes(write_gguf({"a": "b"}, {"t": ((3, 4), kind, values.astype(dtype).tobytes())}))
    tensor = _read(path)
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor, values.astype(np.float32))


def test_metadata_of_every_shape_is_read(tmp_path: Path, write_gguf: Any) -> None:
    metadata = {"s": "häß", "i": 7, "f": 0.5, "strings": ["a", ""], "numbers": [1, -2, 3]}
    path = tmp_path / "m.gguf"
    path.write_bytes(write_gguf(metadata, {}))
    with GgufFile(path) as file:
        assert file.metadata == metadata


def test_a_file_cut_anywhere_is_refused_with_a_reason(tmp_path: Path, write_gguf: Any) -> None:
    values = np.arange(16, dtype="<f4")
    whole = write_gguf({"k": ["x", "y"], "n": 3}, {"t": ((4, 4), F32, values.tobytes())})
    path = tmp_path / "m.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(EngineError, match=r"m\.gguf"):
            _read(path)


def test_a_damaged_file_is_read_or_refused_but_never_crashes(tmp_path: Path, write_gguf: Any) -> None:
    chance = random.Random(3)
    whole = write_gguf({"k": ["x", "y"], "n": [3, 4]}, {"t": ((4, 32), Q8_0, chance.randbytes(136))})
    path = tmp_path / "m.gguf"
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(whole))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        path.write_bytes(damaged)
        try:
            with GgufFile(path) as file, np.errstate(all="ignore"):
                for name in file.tensors:
                    assert file.tensor(name).dtype == np.float32
        except EngineError:
            refused += 1
    assert refused > 50


def test_what_is_no_model_is_named(tmp_path: Path, write_gguf: Any) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(EngineError, match="does not exist"):
        GgufFile(path)
    path.write_bytes(b"")
    with pytest.raises(EngineError, match="cannot be read"):
        GgufFile(path)
    path.write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(EngineError, match="is not a GGUF file"):
        GgufFile(path)
    path.write_bytes(write_gguf({}, {"t": ((2, 2), 12, bytes(64))}))
    with pytest.raises(EngineError, match="in type 12, understood are F32"):
        GgufFile(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, write_gguf: Any) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(write_gguf({}, {"t": ((2, 2), F32, bytes(16))}))
    with GgufFile(path) as file:
        with pytest.raises(EngineError, match=r"shape \(2, 2\) where \(4, 1\) is needed"):
            file.tensor("t", (4, 1))
        with pytest.raises(EngineError, match="no tensor 'u'"):
            file.tensor("u")
