"""Texts to price, of eight kinds, made from what ships with Python and from Django's translations.

Every kind has two halves that share no document: prices are fitted to one (``fit``) and judged on the other
(``judge``). The half of a document is a checksum of its name, so neither seed nor order moves it.
"""

from __future__ import annotations

import base64
import gettext
import inspect
import json
import pydoc_data.topics
import sysconfig
import textwrap
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

Half = Literal["fit", "judge"]
Text = Callable[[Random, int], str]
"""A text of about so many UTF-8 bytes."""

STDLIB: Final = Path(sysconfig.get_paths()["stdlib"])
PACKAGES: Final = Path(sysconfig.get_paths()["purelib"])
LANGUAGES: Final = (
    "de", "fr", "es", "pt_BR", "it", "pl", "cs", "tr", "vi", "fi", "hu", "id",
    "ru", "uk", "el", "bg", "ar", "he", "fa", "hi", "th", "ja", "ko",
)  # fmt: skip
CODE_DIRECTORIES: Final = ("asyncio", "email", "json", "http", "xml", "unittest", "logging", "concurrent", ".")


def half_of(name: str) -> Half:
    """Which half a document belongs to."""
    return "fit" if zlib.crc32(name.encode()) & 1 else "judge"


def _sources(half: Half) -> list[str]:
    found = []
    for directory in CODE_DIRECTORIES:
        for path in sorted((STDLIB / directory).glob("*.py")):
            if half_of(path.name) == half and path.stat().st_size > 4_000:
                found += [path.read_text("utf-8", "replace")]
    return found


def _prose(half: Half, sources: list[str]) -> list[str]:
    """Help topics of Python's manual, module docstrings, and Python's licence."""
    found = [text for name, text in pydoc_data.topics.topics.items() if half_of(name) == half and len(text) > 600]
    for source in sources:
        if source.startswith(('"""', 'r"""')) and len(doc := source.split('"""')[1]) > 600:
            found += [inspect.cleandoc(doc)]
    licence = STDLIB / "LICENSE.txt"
    if licence.is_file() and half_of(licence.name) == half:
        found.append(licence.read_text("utf-8"))
    return found


def _sentences(language: str, half: Half) -> list[str]:
    found = []
    for path in sorted((PACKAGES / "django").rglob(f"locale/{language}/LC_MESSAGES/*.mo")):
        with path.open("rb") as file:
            catalog: dict[Any, str] = vars(gettext.GNUTranslations(file))["_catalog"]
        for original, translated in catalog.items():
            name = original if isinstance(original, str) else original[0]
            if name and len(translated) > 12 and half_of(name) == half:
                found.append(translated)
    return found


def _cut(rng: Random, documents: list[str], size: int) -> str:
    """A piece of one document, from the beginning of a line."""
    document = rng.choice(documents)
    start = rng.randrange(max(1, len(document) - size // 2))
    start = document.rfind("\n", 0, start) + 1
    return _fit(document[start:], size)


def _fit(text: str, size: int) -> str:
    return text.encode()[:size].decode("utf-8", "ignore")


def _from_sentences(by_language: dict[str, list[str]]) -> Text:
    def text(rng: Random, size: int) -> str:
        sentences = by_language[rng.choice(sorted(by_language))]
        parts: list[str] = []
        length = 0
        while length < size:
            parts.append(rng.choice(sentences))
            length += len(parts[-1].encode()) + 1
        return _fit(rng.choice([" ", "\n"]).join(parts), size)

    return text


def _record(rng: Random, words: list[str]) -> dict[str, Any]:
    word, below = rng.choice, rng.randrange
    return {
        "id": word([below(10**6), f"{rng.getrandbits(128):032x}", f"{word(words)}-{below(999)}"]),
        word(words): word([round(rng.gauss(0, 100), below(1, 6)), below(10 ** below(1, 9))]),
        f"{word(words)}_{word(words)}": [word(words) for _ in range(below(4))],
        "created_at": f"20{below(10, 27)}-{below(1, 13):02}-{below(1, 29):02}T12:{below(60):02}:00Z",
        word(words): {word(words): rng.random() < 0.5, "note": " ".join(word(words) for _ in range(rng.randrange(12)))},
    }


def _json_text(words: list[str]) -> Text:
    def text(rng: Random, size: int) -> str:
        rows = [_record(rng, words) for _ in range(size // 150 + 1)]
        indent = rng.choice([None, None, 2, 4])
        separators = (",", ":") if indent is None and rng.random() < 0.5 else None
        return _fit(json.dumps(rows, indent=indent, separators=separators), size)

    return text


def _with_base64(prose: list[str]) -> Text:
    """Prose around a payload of a tenth to nine tenths: a mail, a certificate, a small file pasted into a prompt."""

    def text(rng: Random, size: int) -> str:
        payload = base64.b64encode(zlib.compress(rng.randbytes(size)))[: int(size * rng.uniform(0.1, 0.9))].decode()
        if rng.random() < 0.5:
            payload = "\n".join(textwrap.wrap(payload, 76))
        around = _cut(rng, prose, size - len(payload))
        half = len(around) // 2
        return f"{around[:half]}\n{payload}\n{around[half:]}"

    return text


def texts(half: Half) -> dict[str, Text]:
    """A maker of texts of each kind, from the documents of one half. Without Django, two kinds are missing."""
    sources = _sources(half)
    prose = _prose(half, sources)
    words = [word for word in " ".join(prose).split() if word.isalpha() and 3 < len(word) < 12]
    found: dict[str, Text] = {
        "prose": lambda rng, size: _cut(rng, prose, size),
        "code": lambda rng, size: _cut(rng, sources, size),
        "json": _json_text(words),
        "base64": _with_base64(prose),
    }
    if (PACKAGES / "django").is_dir():
        chinese = {language: _sentences(language, half) for language in ("zh_Hans", "zh_Hant")}
        found["chinese"] = _from_sentences(chinese)
        found["languages"] = _from_sentences({language: _sentences(language, half) for language in LANGUAGES})
    return found


def _repeated(alphabet: str) -> Text:
    return lambda rng, size: _fit("".join(rng.choices(alphabet, k=size)), size)


def _log_lines(rng: Random, size: int) -> str:
    lines = (
        f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02} 12:{rng.randrange(60):02}:{rng.randrange(60):02} "
        f"{rng.choice(['INFO', 'WARN', 'ERROR'])} {rng.getrandbits(64):016x} took={rng.random() * 100:.3f}ms"
        for _ in range(size // 50 + 1)
    )
    return _fit("\n".join(lines), size)


def oddities() -> dict[str, Text]:
    """Texts of no language, as tests and attacks send them."""
    return {
        "digits": _repeated("0123456789"),
        "hexadecimal": _repeated("0123456789abcdef"),
        "base64 only": _repeated("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"),
        "spaces": _repeated(" "),
        "one letter": _repeated("a"),
        "emoji": _repeated("😀😂🚀🎉👍🔥🤖💡🌍🧪"),
        "ideographs": _repeated("".join(map(chr, range(0x4E00, 0x9FA5)))),
        "log lines": _log_lines,
    }


Chat = tuple[bytes, list[str]]
"""A body, and the contents of its messages."""


def bodies(rng: Random, make: Callable[[int], str], *, escaped: bool) -> Chat:
    """One chat body of 0.2 to 8 kB; three in seven are histories."""
    size = int(200 * 40 ** rng.random())
    turns = rng.choice([1, 1, 1, 1, 3, 5, 9])
    contents = [make(size)]
    if turns > 1:
        contents = [make(max(60, int(size / turns * rng.uniform(0.3, 1.7)))) for _ in range(turns)]
    messages = [{"role": "assistant" if turn % 2 else "user", "content": text} for turn, text in enumerate(contents)]
    if rng.random() < 0.3:
        contents.insert(0, "You are a helpful assistant. Answer briefly.")
        messages.insert(0, {"role": "system", "content": contents[0]})
    fields: dict[str, Any] = {"model": "m", "messages": messages}
    if rng.random() < 0.5:
        fields["max_tokens"] = rng.choice([64, 256, 1024])
    if rng.random() < 0.3:
        fields |= {"temperature": 0.7, "stream": True}
    separators = (",", ":") if rng.random() < 0.5 else None
    return json.dumps(fields, ensure_ascii=escaped, separators=separators).encode(), contents
