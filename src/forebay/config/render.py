"""Shows the configuration to people: a commented default file, and the reference in docs/configuration.md.

Both are made from the schema, so they cannot say something else than the code does. Run as a module with `--docs` to
rewrite the generated part of the reference.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import NODEFAULT, Meta
from msgspec.structs import FieldInfo, fields

from forebay.config.fields import Section
from forebay.config.read import bare, is_section, walk
from forebay.config.schema import LATER, Config
from forebay.config.secret import Secret

BEGIN = "<!-- generated: begin -->"
END = "<!-- generated: end -->"

_INTRO = """\
Forebay's configuration: every setting with its default.
A '#' directly before a name or '[' marks what is not set by default; remove it to set it.
Every setting may also be given in the environment as FOREBAY_SECTION__FIELD."""

_EXAMPLE_NAMES = {"classes": "interactive", "teams": "ops"}


@dataclass(frozen=True, slots=True)
class Table:
    """One section: its TOML header, what it is for, and its plain fields."""

    header: str
    text: str
    fields: tuple[FieldInfo, ...]
    by_default: bool  # False: an entry of a list or map, of which there is none by default


def tables(kind: type[Section] = Config, name: str = "", by_default: bool = True) -> Iterator[Table]:
    """Every section in the order of the schema; sections within follow the one that holds them."""
    plain: list[FieldInfo] = []
    inner: list[Table] = []
    for info in fields(kind):
        path = f"{name}.{info.encode_name}" if name else info.encode_name
        if tuple(path.split(".")) in LATER:
            continue
        held = bare(info.type)
        if is_section(held):
            inner += tables(held, path, by_default and info.default is not None)
        elif get_origin(held) is tuple and is_section(item := bare(get_args(held)[0])):
            inner += _listed(item, path)
        elif get_origin(held) is dict and is_section(item := bare(get_args(held)[1])):
            inner += tables(item, f"{path}.{_EXAMPLE_NAMES.get(path, 'NAME')}", False)
        else:
            plain.append(info)
    if plain:
        yield Table(f"[{name}]", _doc(kind), tuple(plain), by_default)
    yield from inner


def _listed(kind: type[Section], path: str) -> Iterator[Table]:
    for table in tables(kind, path, False):
        header = f"[[{path}]]" if table.header == f"[{path}]" else table.header
        yield Table(header, table.text, table.fields, False)


def default_file() -> str:
    """A TOML file that states every default and explains every field."""
    lines = _comment(_INTRO)
    for table in tables():
        mark = "" if table.by_default else "#"
        lines += ["", "", *_comment(table.text), f"{mark}{table.header}"]
        for info in table.fields:
            lines += ["", *_comment(description(info))]
            set_to = info.default if info.default is not NODEFAULT else None
            shown = example(info) if set_to is None or not table.by_default else None
            off = mark or ("#" if set_to is None else "")
            lines.append(f"{off}{info.encode_name} = {toml(set_to if shown is None else shown)}")
    return "\n".join(lines) + "\n"


def reference() -> str:
    """The generated part of docs/configuration.md."""
    lines: list[str] = []
    for table in tables():
        lines += [f"### `{table.header}`", "", table.text, ""]
        lines += ["| field | value | default | meaning |", "|---|---|---|---|"]
        for info in table.fields:
            default = "required" if info.default is NODEFAULT else "–"
            if info.default is not NODEFAULT and info.default is not None:
                default = f"`{toml(info.default)}`"
            lines.append(f"| `{info.encode_name}` | {allowed(info.type)} | {default} | {description(info)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def description(info: FieldInfo) -> str:
    """What a field is for, from its annotation."""
    return next((meta.description for meta in _metas(info.type) if meta.description), "")


def example(info: FieldInfo) -> Any:
    """A value for a field that has no default."""
    return next((meta.examples[0] for meta in _metas(info.type) if meta.examples), None)


def allowed(kind: Any) -> str:
    """The values that a type takes, in words."""
    choices = [str(c) for part in walk(kind) if get_origin(part) is Literal for c in get_args(part)]
    choices += [str(c.value) for part in walk(kind) if isinstance(part, type) and issubclass(part, Enum) for c in part]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if any(get_origin(part) is tuple for part in walk(kind)):
        return "list of text"
    words = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", Secret: "secret"}
    word = next(words[part] for part in walk(kind) if part in words)
    if word in ("whole number", "number"):
        metas = list(_metas(kind))
        low = next((f"≥ {m.ge:g}" if m.ge is not None else f"> {m.gt:g}" for m in metas if _has_low(m)), "")
        high = next((f"≤ {m.le:,}".replace(",", " ") for m in metas if m.le is not None), "")
        word = " ".join(part for part in (word, ", ".join(bound for bound in (low, high) if bound)) if part)
    return word


def toml(value: Any) -> str:
    """A plain value as TOML."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{toml(name)} = {toml(item)}" for name, item in value.items()) + " }" if value else "{}"
        )
    return json.dumps(value, ensure_ascii=False)


def _has_low(meta: Meta) -> bool:
    return meta.ge is not None or meta.gt is not None


def _metas(kind: Any) -> Iterator[Meta]:
    """Annotations from the outside in."""
    if get_origin(kind) is Annotated:
        inner, *metas = get_args(kind)
        yield from (meta for meta in reversed(metas) if isinstance(meta, Meta))
        yield from _metas(inner)
    elif get_origin(kind) is Union:
        for option in get_args(kind):
            yield from _metas(option)


def _doc(kind: type[Section]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _comment(text: str) -> list[str]:
    return [f"# {line}" for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, 116)]


def with_reference(page: str) -> str:
    """The page with its generated part made anew."""
    head, _, rest = page.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """`--docs [FILE]`: rewrite the reference in FILE (docs/configuration.md); else print the default file."""
    if arguments[:1] == ["--docs"]:
        page = Path(arguments[1] if len(arguments) > 1 else "docs/configuration.md")
        page.write_text(with_reference(page.read_text("utf-8")), "utf-8")
        return 0
    sys.stdout.write(default_file())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
