"""Reader of GGUF files: metadata, and tensors turned into float32, one at a time, from a memory map.

Every length in the file is checked before it is used, so a truncated or hostile file ends in `EngineError` with the
reason, never in an index error, a wild allocation or a crash. Only the tensor types that small chat models use are
understood: F32, F16, Q4_1, Q8_0 and Q6_K.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import numpy as np

from forebay.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

# GGUF value types that are plain numbers; 8 is a string, 9 an array.
_SCALARS: Final[dict[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMENSIONS: Final = 4
_MAX_STRING_BYTES: Final = 1 << 24
_MAX_ALIGNMENT: Final = 1 << 16

_Q4_1: Final = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
_Q8_0: Final = np.dtype([("d", "<f2"), ("q", "i1", 32)])
_Q6_K: Final = np.dtype([("ql", "u1", (2, 64)), ("qh", "u1", (2, 32)), ("sc", "i1", 16), ("d", "<f2")])


def _plain(raw: npt.NDArray[Any]) -> Floats:
    return raw.astype(np.float32)


def _q4_1(raw: npt.NDArray[Any]) -> Floats:
    """Blocks of 32: four bits each, times a scale, plus a minimum."""
    out = np.empty((len(raw), 32), np.float32)
    out[:, :16] = raw["q"] & 15
    out[:, 16:] = raw["q"] >> 4
    out *= raw["d"].astype(np.float32)[:, None]
    out += raw["m"].astype(np.float32)[:, None]
    return out


def _q8_0(raw: npt.NDArray[Any]) -> Floats:
    """Blocks of 32: a signed byte each, times a scale."""
    out: Floats = raw["q"].astype(np.float32)
    out *= raw["d"].astype(np.float32)[:, None]
    return out


def _q6_k(raw: npt.NDArray[Any]) -> Floats:
    """Blocks of 256: six bits each (low nibbles and high pairs kept apart), a scale per 16, one for the block."""
    low, high = raw["ql"], raw["qh"]
    quarters = [
        (low[..., :32] & 15) | ((high & 3) << 4),
        (low[..., 32:] & 15) | (((high >> 2) & 3) << 4),
        (low[..., :32] >> 4) | (((high >> 4) & 3) << 4),
        (low[..., 32:] >> 4) | (((high >> 6) & 3) << 4),
    ]
    out = np.stack(quarters, axis=2).astype(np.float32).reshape(len(raw), 16, 16)
    out -= 32
    out *= (raw["d"].astype(np.float32)[:, None] * raw["sc"].astype(np.float32))[:, :, None]
    return out.reshape(len(raw), 256)


@dataclass(frozen=True, slots=True)
class _Encoding:
    name: str
    block: int
    """Values per block; the innermost dimension is a multiple of it."""
    layout: np.dtype[Any]
    decode: Callable[[npt.NDArray[Any]], Floats]


_ENCODINGS: Final[dict[int, _Encoding]] = {
    0: _Encoding("F32", 1, np.dtype("<f4"), _plain),
    1: _Encoding("F16", 1, np.dtype("<f2"), _plain),
    3: _Encoding("Q4_1", 32, _Q4_1, _q4_1),
    8: _Encoding("Q8_0", 32, _Q8_0, _q8_0),
    14: _Encoding("Q6_K", 256, _Q6_K, _q6_k),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `shape` is row-major (the file's own order reversed), `offset` is from the file's start."""

    shape: tuple[int, ...]
    type: int
    offset: int


class GgufFile:
    """An open GGUF file; a context manager, because it holds a memory map.

    Raises:
        EngineError: the file is missing, unreadable, truncated, or not a GGUF that this reader understands.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise EngineError(f"model file {path} does not exist") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise EngineError(f"model file {path} cannot be read: {error}") from None
        self._at = 0
        self._size = len(self._map)
        try:
            self._read_header()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Floats:
        """The named tensor as a new float32 array.

        Raises:
            EngineError: no such tensor, or its shape is not `shape`.
        """
        info = self.tensors.get(name)
        if info is None:
            self._refuse(f"has no tensor {name!r}")
        if shape is not None and info.shape != shape:
            self._refuse(f"has tensor {name!r} of shape {info.shape} where {shape} is needed")
        encoding = _ENCODINGS[info.type]
        blocks = math.prod(info.shape) // encoding.block
        raw = np.frombuffer(self._map, encoding.layout, blocks, info.offset)
        try:
            return encoding.decode(raw).reshape(info.shape)
        finally:
            del raw  # a live view would keep the map from closing

    def _refuse(self, what: str) -> NoReturn:
        raise EngineError(f"model file {self.path} {what}; fetch it again, or give another file") from None

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > self._size:
            self._refuse(f"is truncated: {size} bytes wanted at byte {self._at}, the file ends at {self._size}")
        taken = self._map[self._at : end]
        self._at = end
        return taken

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _count(self, unit: int, what: str) -> int:
        """A count of items of at least `unit` bytes each, refused when the rest of the file cannot hold them."""
        count: int = self._number("Q")
        if count > (self._size - self._at) // unit:
            self._refuse(f"is truncated or corrupt: it claims {count} {what} at byte {self._at}")
        return count

    def _string(self) -> str:
        size: int = self._number("Q")
        if size > _MAX_STRING_BYTES:
            self._refuse(f"is corrupt: a string of {size} bytes at byte {self._at}")
        return self._take(size).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item: int = self._number("I")
            if item == _STRING:
                return [self._string() for _ in range(self._count(8, "strings"))]
            code = self._scalar(item)
            size = struct.calcsize("<" + code)
            count = self._count(size, "numbers")
            return list(struct.unpack(f"<{count}{code}", self._take(count * size)))
        return self._number(self._scalar(kind))

    def _scalar(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            self._refuse(f"is corrupt: metadata of unknown type {kind} at byte {self._at}")
        return code

    def _read_header(self) -> None:
        if self._take(4) != MAGIC:
            self._refuse("is not a GGUF file")
        version: int = self._number("I")
        if version not in VERSIONS:
            self._refuse(f"has GGUF version {version}, understood are {VERSIONS}")
        tensor_count = self._count(24, "tensors")
        value_count = self._count(13, "metadata values")
        for _ in range(value_count):
            key = self._string()
            self.metadata[key] = self._value(self._number("I"))
        placed = [self._read_tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            self._refuse(f"is corrupt: alignment {alignment!r}")
        base = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in placed:
            self._place(name, shape, kind, base + offset)

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions: int = self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"is corrupt: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        """Checks a tensor's type and extent now, so that `tensor` cannot fail on them later."""
        encoding = _ENCODINGS.get(kind)
        if encoding is None:
            known = ", ".join(known.name for known in _ENCODINGS.values())
            self._refuse(f"stores tensor {name!r} in type {kind}, understood are {known}")
        if shape[-1] % encoding.block or 0 in shape:
            self._refuse(f"is corrupt: tensor {name!r} of shape {shape} is not whole {encoding.name} blocks")
        end = offset + math.prod(shape) // encoding.block * encoding.layout.itemsize
        if end > self._size:
            self._refuse(f"is truncated: tensor {name!r} ends at byte {end}, the file at {self._size}")
        if name in self.tensors:
            self._refuse(f"is corrupt: tensor {name!r} occurs twice")
        self.tensors[name] = TensorInfo(shape, kind, offset)
