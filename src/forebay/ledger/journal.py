"""The journal: a local, append-only file of what keys used, written before the store hears of it.

It is a folder of segments. A segment begins with a header that names the journal; frames follow, each with a checksum
and the next number. One frame holds what was settled or metered since the one before:

    segment   MAGIC | crc32 | journal id, 16 bytes | segment number, u64
    frame     FRAME | crc32 | length, u32 | number, u64 | milliseconds since 1970, u64 | msgpack [[kind, key, …], …]

A crash may cut the last frame anywhere: the frames before it are whole, and it is left out. A segment is removed once
the store has all of it. One process at a time owns the folder.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from forebay.errors import ForebayError

MAGIC = b"FOREBAY JOURNAL1"
FRAME = b"FBfr"
SEGMENT_HEAD = struct.Struct("<16sI16sQ")
FRAME_HEAD = struct.Struct("<4sIIQQ")
CHECKED = 8  # bytes of a frame before what its checksum covers
SEGMENT_BYTES = 8 * 1024 * 1024
SUFFIX = ".journal"


SETTLED, PREPAID, METERED = range(3)
"""What a record says: a request ended, and this is what it used; the same, of a key that pays with credit; or a stream
of such a key is under way, and has used this so far."""

Record = tuple[int, str, int, int, int, str]
"""Kind, key, number of the request in its process, input tokens, output tokens; and its model, where the days of that
model are counted apart, else ''."""


class Frame(NamedTuple):
    """Records that were written together."""

    number: int
    at_ms: int
    records: list[Record]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode
_decode_without_models = msgspec.msgpack.Decoder(list[tuple[int, str, int, int, int]]).decode


def frame_bytes(frame: Frame) -> bytes:
    """A frame as it stands in the file."""
    body = _encode(frame.records)
    checked = struct.pack("<IQQ", len(body), frame.number, frame.at_ms) + body
    return FRAME + struct.pack("<I", crc32(checked)) + checked


def read_frames(data: bytes, start: int = 0) -> Iterator[tuple[Frame, int]]:
    """The whole frames from `start` on, each with the offset of its end, up to the first that is not whole."""
    while len(data) - start >= FRAME_HEAD.size:
        magic, checksum, length, number, at_ms = FRAME_HEAD.unpack_from(data, start)
        end = start + FRAME_HEAD.size + length
        if magic != FRAME or end > len(data) or crc32(memoryview(data)[start + CHECKED : end]) != checksum:
            return
        try:
            records = _records(memoryview(data)[start + FRAME_HEAD.size : end])
        except msgspec.MsgspecError:
            return
        yield Frame(number, at_ms, records), end
        start = end


def _records(body: memoryview) -> list[Record]:
    """Those of a frame. Raises MsgspecError."""
    try:
        return _decode(body)
    except msgspec.ValidationError:  # an earlier version wrote it
        return [(*record, "") for record in _decode_without_models(body)]


class Leftover:
    """What an earlier process left in the folder: read one segment at a time, since there may be much of it."""

    def __init__(self, journal: str, paths: list[Path]) -> None:
        self.journal = journal
        self.damaged: list[str] = []  # what could not be read, for a person, once `frames` has ended
        self._paths = paths

    def frames(self) -> Iterator[Frame]:
        """All whole frames, in order. A last one that was cut short is left out, and is no damage."""
        last = None
        for path in self._paths:
            data = path.read_bytes()
            end = SEGMENT_HEAD.size
            if _segment_head(data) != self.journal:
                if len(data) >= end:
                    self.damaged.append(f"{path.name} is no segment of journal {self.journal}")
                continue  # else it was cut short before its first frame
            for frame, frame_end in read_frames(data, end):
                if last is not None and frame.number != last + 1:
                    self.damaged.append(f"{path.name} goes on with frame {frame.number} after {last}")
                last, end = frame.number, frame_end
                yield frame
            if FRAME in data[end + len(FRAME) :]:
                self.damaged.append(f"{path.name} cannot be read from byte {end} on, and more follows")


class Journal:
    """A folder of segments, owned by this process. Raises ForebayError when it cannot be had, OSError from writing."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.number = 0  # of the last frame that was written
        self.id = ""
        self.begun = False
        self._segment_bytes = segment_bytes
        self._segments: list[tuple[Path, int, int]] = []  # earlier ones: path, last frame, bytes
        self._file = -1
        self._path = folder
        self._good = 0  # bytes of the current segment that are whole frames
        self._turning = (
            threading.Lock()
        )  # a segment is not closed while it is synced, nor one listed while one is removed
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ForebayError(
                f"the journal {folder} cannot be opened: {error.strerror}; give this user the right to write there, or "
                "set [ledger] journal to a folder of its own"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ForebayError(
                f"the journal {folder} belongs to another gateway that runs; give each its own with [ledger] journal"
            ) from None

    # ---- what was left -----------------------------------------------------------------------------------------

    def leftover(self) -> Leftover | None:
        """What an earlier process left here; None when it left nothing."""
        paths = self._files()
        for path in paths:
            with path.open("rb") as file:
                journal = _segment_head(file.read(SEGMENT_HEAD.size))
            if journal is not None:
                return Leftover(journal, paths)
        return None

    def clear(self, *, keep_damaged: bool) -> None:
        """Remove what was left, now that the store has it; or put it aside for a person to look at."""
        for path in self._files():
            if keep_damaged:
                path.rename(path.with_suffix(".damaged"))
            else:
                path.unlink()
        self._sync_folder()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{SUFFIX}"))

    # ---- writing -----------------------------------------------------------------------------------------------

    def begin(self, journal: str) -> None:
        """Begin a new journal under this id (32 hexadecimal digits). Raises OSError."""
        self.id = journal
        self._open_segment(1)
        self.begun = True

    @property
    def size(self) -> int:
        """Bytes in the folder."""
        return self._good + sum(size for _, _, size in list(self._segments))

    @property
    def full(self) -> bool:
        """Is it time for another segment?"""
        return self._good >= self._segment_bytes

    def turn(self) -> None:
        """Go on in a new segment. What is still under way must be metered anew there. Raises OSError."""
        with self._turning:
            os.fdatasync(self._file)
            done = (self._path, self.number, self._good)
            before = self._file
            self._open_segment(int(self._path.stem) + 1)
            self._segments.append(done)
            os.close(before)

    def append(self, records: Sequence[Record], at_ms: int) -> int:
        """Write one frame; returns its number. Raises OSError, and then nothing of it stays in the file."""
        data = frame_bytes(Frame(self.number + 1, at_ms, list(records)))
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            os.ftruncate(self._file, self._good)
            raise
        self._good += len(data)
        self.number += 1
        return self.number

    def sync(self) -> None:
        """Wait until all that was written would survive a loss of power. Raises OSError."""
        with self._turning:
            os.fdatasync(self._file)

    def posted(self, number: int) -> None:
        """The store has the frames up to `number`: remove the earlier segments that hold nothing beyond it."""
        with self._turning:
            while self._segments and self._segments[0][1] <= number and self._good > SEGMENT_HEAD.size:
                self._segments.pop(0)[0].unlink(missing_ok=True)

    def end(self, *, remove: bool) -> None:
        """Let go of the folder; `remove` what was written, when the store has all of it."""
        if self._file >= 0:
            if not remove:
                os.fdatasync(self._file)
            os.close(self._file)
            self._file = -1
        if remove:
            self.clear(keep_damaged=False)
        os.close(self._lock)

    def _open_segment(self, number: int) -> None:
        path = self.folder / f"{number:010}{SUFFIX}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        named = bytes.fromhex(self.id) + number.to_bytes(8, "little")
        try:
            os.write(file, MAGIC + struct.pack("<I", crc32(named)) + named)
            os.fdatasync(file)
            self._sync_folder()
        except OSError:
            os.close(file)
            path.unlink()
            raise
        self._file, self._path, self._good = file, path, SEGMENT_HEAD.size

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _segment_head(data: bytes) -> str | None:
    if len(data) < SEGMENT_HEAD.size:
        return None
    magic, checksum, journal, number = SEGMENT_HEAD.unpack_from(data)
    if magic != MAGIC or crc32(journal + number.to_bytes(8, "little")) != checksum:
        return None
    return str(journal.hex())
