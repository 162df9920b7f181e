"""The rows of a log or trace, whoever wrote it: CSV or JSON lines, plain or gzip, columns found by their names.

Whatever is wrong with a file is said with its name, line and field. A file is read to its end, or not at all.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from forebay.errors import UsageError

TOKENS_MAX = 10_000_000
"""More tokens than this in one request are a mistake of the file."""

NAMES: dict[str, tuple[str, ...]] = {
    "arrival_s": (
        *("arrival_s", "arrived_at", "arrival_time", "timestamp", "time", "ts", "start_time", "created_at", "created"),
        *("request_time", "arrival_ms", "timestamp_ms", "time_ms", "ts_ms", "start_time_ms"),
    ),
    "prompt_tokens": (
        *("prompt_tokens", "input_tokens", "contexttokens", "context_tokens", "request_tokens", "input_length"),
        *("prompt_length", "input_len", "prompt_len", "num_prefill_tokens", "num_prompt_tokens"),
        *("usage_prompt_tokens", "usage_input_tokens"),
    ),
    "output_tokens": (
        *("output_tokens", "completion_tokens", "generatedtokens", "generated_tokens", "response_tokens"),
        *("output_length", "completion_length", "output_len", "num_decode_tokens", "num_output_tokens"),
        *("usage_completion_tokens", "usage_output_tokens"),
    ),
    "key_id": ("key_id", "key", "api_key_id", "client_id", "client", "user_id", "user", "tenant_id", "tenant"),
    "session_id": ("session_id", "session", "conversation_id", "chat_id"),
    "reusable_prefix_tokens": ("reusable_prefix_tokens", "prefix_tokens", "cached_tokens", "cached_prompt_tokens"),
}
"""What a column means -> the names that it goes by, the first found wins. Names are compared in lower case, with `_`
for whatever is no letter and no digit; a nested JSON field is called `outer_inner`."""

NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
_FORMATS = {b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "zstandard", b"PAR1": "Parquet", b"BZh": "bzip2"}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Row(NamedTuple):
    """One request of a file. `at` is seconds since some moment that all rows share; NaN when the file has no times."""

    at: float
    prompt_tokens: int
    output_tokens: int
    key: str
    session: str
    prefix_tokens: int
    line: int


class BadField(Exception):  # noqa: N818 - it becomes the UsageError that names file and line
    """A field cannot be used."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def read_rows(path: Path) -> list[Row]:
    """All rows in the file's order.

    Raises UsageError with file, line, field and reason when the file cannot be used.
    """
    rows: list[Row] = []
    try:
        with path.open("rb") as plain, _unpacked(plain, path) as file:
            lines = _Lines(file)
            try:
                rows.extend(_parsed(lines, path))
            except BadField as error:
                where = f"{path}, line {lines.number}, field `{error.field}`"
                raise UsageError(f"{where}: {error}") from None
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path}, line {lines.number}: byte 0x{error.object[error.start]:02x} is not UTF-8: "
                    "save the file as UTF-8"
                ) from None
            except (EOFError, zlib.error, gzip.BadGzipFile):
                raise UsageError(
                    f"{path}, after line {lines.number}: the gzip data breaks off or is damaged: copy the file again"
                ) from None
            except (csv.Error, msgspec.DecodeError, RecursionError) as error:
                raise UsageError(f"{path}, line {lines.number}: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read as a trace: {error.strerror or error}") from None
    if not rows:
        raise UsageError(f"{path}: the trace holds no request")
    return rows


def _unpacked(plain: BinaryIO, path: Path) -> BinaryIO:
    """The file's text bytes, whatever its name says."""
    start = plain.read(4)
    plain.seek(0)
    for magic, name in _FORMATS.items():
        if start.startswith(magic):
            raise UsageError(f"{path}: this is {name}; CSV or JSON lines are read, plain or gzip: convert it first")
    if start.startswith(_UTF16):
        raise UsageError(f"{path}, line 1: this is UTF-16; save the file as UTF-8")
    return gzip.GzipFile(fileobj=plain) if start.startswith(b"\x1f\x8b") else plain  # type: ignore[return-value]


class _Lines:
    """Decoded lines, counted."""

    def __init__(self, file: BinaryIO) -> None:
        self.number = 0
        self._lines = iter(file)

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.number += 1
            yield line.decode("utf-8-sig" if self.number == 1 else "utf-8")


def _parsed(lines: _Lines, path: Path) -> Iterator[Row]:
    text = iter(lines)
    first = next((line for line in text if line.strip()), None)
    if first is None:
        raise UsageError(f"{path}: the file is empty")
    if first.lstrip().startswith("["):
        raise UsageError(f"{path}, line {lines.number}: this is a JSON array; one JSON object per line is read")
    if first.lstrip().startswith("{"):
        yield from _json_rows(first, text, lines, path)
    else:
        yield from _csv_rows(first, text, lines, path)


# ---- CSV ---------------------------------------------------------------------------------------------------------


def _csv_rows(first: str, text: Iterator[str], lines: _Lines, path: Path) -> Iterator[Row]:
    delimiter = max(",;\t", key=first.count)
    header = next(csv.reader([first], delimiter=delimiter))
    columns = Columns(header, lambda problem: UsageError(f"{path}, line {lines.number}: {problem}"))
    width = len(header)
    for fields in csv.reader(text, delimiter=delimiter):
        if len(fields) == width:
            yield columns.row(fields, lines.number)
        elif fields:
            count = f"{len(fields)} field{'s' * (len(fields) != 1)}"
            raise UsageError(f"{path}, line {lines.number}: {count} where the header names {width}")


class Columns:
    """Which column holds what, and how it is read."""

    def __init__(self, header: list[str], problem: Callable[[str], UsageError]) -> None:
        """`problem` makes the error from its text. Raises it when a needed column is absent."""
        plain = [plain_name(name) for name in header]
        self._names = [name.strip() for name in header]
        self._at: dict[str, int] = {}
        for meaning, names in NAMES.items():
            found = next((plain.index(name) for name in names if name in plain), None)
            if found is not None:
                self._at[meaning] = found
            elif meaning in NEEDED:
                raise problem(_missing(meaning, header, plain))
        self._time, self._prompt, self._output = (self._at[meaning] for meaning in NEEDED)
        time_name = plain[self._time]
        # Mooncake's own files: `timestamp` beside `hash_ids` is in ms.
        in_ms = time_name.endswith("_ms") or (time_name == "timestamp" and "hash_ids" in plain)
        self._scale = 1000.0 if in_ms else 1.0
        # An empty time is an absent one only where no row has any: the first row decides.
        self._timed: bool | None = None

    def row(self, fields: list[Any], line: int) -> Row:
        """The row of these fields. Raises BadField."""
        at = fields[self._time]
        if self._timed is None:
            self._timed = at != ""
        extra = self._at
        key, session, prefix = extra.get("key_id"), extra.get("session_id"), extra.get("reusable_prefix_tokens")
        return Row(
            self._seconds(at) if self._timed or at != "" else math.nan,
            # A request that produced nothing still costs something: sizes are at least one token.
            self._tokens(fields[self._prompt], self._prompt) or 1,
            self._tokens(fields[self._output], self._output) or 1,
            "" if key is None else _label(fields[key]),
            "" if session is None else _label(fields[session]),
            0 if prefix is None or fields[prefix] in {"", None} else self._tokens(fields[prefix], prefix),
            line,
        )

    def _tokens(self, value: Any, column: int) -> int:
        try:
            tokens = int(value)
            if tokens != value and not isinstance(value, str):
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            tokens = self._written_otherwise(value, column)
        if not 0 <= tokens <= TOKENS_MAX or value is True or value is False:
            raise BadField(self._names[column], f"{_shown(value)} is no number of tokens: 0 to {TOKENS_MAX} are")
        return tokens

    def _written_otherwise(self, value: Any, column: int) -> int:
        """Whole numbers such as `12.0`, as spreadsheets and data frames write them."""
        name = self._names[column]
        if value in {"", None} if isinstance(value, str | None) else False:
            raise BadField(name, "is empty")
        try:
            number = float(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if not number.is_integer():
            raise BadField(name, f"{_shown(value)} is not a whole number")
        return int(number)

    def _seconds(self, value: Any) -> float:
        try:
            at = float(value)
        except (ValueError, TypeError, OverflowError):
            return self._date(value)
        if not math.isfinite(at) or isinstance(value, bool):
            raise BadField(self._names[self._time], f"{_shown(value)} is not a time")
        if abs(at) >= 1e11 and self._scale == 1.0:
            self._scale = 1e3 if abs(at) < 1e14 else 1e6 if abs(at) < 1e17 else 1e9  # counts since 1970
        return at / self._scale

    def _date(self, value: Any) -> float:
        name = self._names[self._time]
        if value == "" or value is None:
            raise BadField(name, "is empty")
        try:
            moment = datetime.fromisoformat(value)
        except (ValueError, TypeError):
            raise BadField(name, f"the time {_shown(value)} is neither seconds nor an ISO date") from None
        # Local time would shift with the machine that reads the file.
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


# ---- JSON lines --------------------------------------------------------------------------------------------------


def _json_rows(first: str, text: Iterator[str], lines: _Lines, path: Path) -> Iterator[Row]:
    decode = msgspec.json.Decoder().decode
    columns: Columns | None = None
    names: list[str] = []
    for line in (_line for source in ((first,), text) for _line in source):
        if not line.strip():
            continue
        flat = _flat(decode(line), path, lines.number)
        if columns is None:
            names = list(flat)
            columns = Columns(names, lambda problem: UsageError(f"{path}, line {lines.number}: {problem}"))
        yield columns.row([flat.get(name, "") for name in names], lines.number)


def _flat(value: Any, path: Path, line: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}, line {line}: this is not a JSON object")
    flat: dict[str, Any] = {}
    for name, field in value.items():
        if isinstance(field, dict):
            flat |= {f"{name}.{inner}": deeper for inner, deeper in field.items()}
        else:
            flat[name] = field
    return flat


# ---- words -------------------------------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """A column's name as it is compared: lower case, `_` for whatever is no letter and no digit."""
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _missing(meaning: str, header: list[str], plain: list[str]) -> str:
    found = ", ".join(name.strip() for name in header[:20])
    if all(re.fullmatch(r"[-+.:\dT ]*", name) for name in header):
        return f"the file begins with figures: put a line of names before it, such as {','.join(NEEDED)}"
    for number, name in enumerate(plain):
        if get_close_matches(name, NAMES[meaning], 1, 0.8):
            return f"no column `{meaning}`: is `{header[number].strip()}` meant? Then rename it"
    others = ", ".join(NAMES[meaning][1:])
    return f"no column `{meaning}`, nor one of {others} (found: {found})"


def _label(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
