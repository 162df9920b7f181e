"""Reads a configuration: flags over environment over file over preset over defaults; all problems told at once."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from forebay.config import check
from forebay.config.lines import Path, index, line_of
from forebay.config.preset import PRESETS
from forebay.config.read import Problem, Reader, Text
from forebay.config.schema import LATER, Config
from forebay.errors import ConfigError

PREFIX = "FOREBAY_"
FILE_BYTES_MAX = 16 * 1024 * 1024

LISTS = frozenset({"engines", "routes"})
"""Sections that are lists, which a variable may hold whole: FOREBAY_ENGINES."""

FLAGS: dict[Path, str] = {
    ("server", "host"): "--host",
    ("server", "port"): "--port",
    ("admin", "port"): "--admin-port",
    ("admission", "mode"): "--mode",
    ("admission", "preset"): "--preset",
    ("engines",): "--upstream",
    ("keys", "store"): "--keys",
}
"""What the settings that commands set are called on the command line."""


class Loaded(NamedTuple):
    """A usable configuration, and what its operator should know about it."""

    config: Config
    warnings: tuple[str, ...]


class _Sources:
    """Where each value came from, for messages."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.lines = index(text)
        self.origins: dict[Path, str] = {}

    def message(self, problem: Problem) -> str:
        """`FILE:LINE: [section] field: reason; what to do`."""
        section, field = _spelt(problem.path)
        what = ": ".join(part for part in (f"{section} {field}".strip(), problem.reason) if part)
        return _on_one_line(f"{self._where(problem.path)}: {what}; {problem.todo}")

    def _where(self, path: Path) -> str:
        origin, around = None, path
        while around:
            if around in self.origins:
                origin = self.origins[around]
                break
            if around in self.lines:
                break
            around = around[:-1]
        if origin is not None:
            return origin
        line = line_of(self.lines, path)
        if line is not None:
            return f"{self.name}:{line}"
        # A table that a variable or flag brought into being by setting something in it.
        within = (origin for place, origin in self.origins.items() if place[: len(path)] == path)
        return next(within, self.name)


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """The configuration of a TOML file (or of none), the environment and flags.

    `flags` maps dotted names ("server.port") to values; None values were not given. Raises ConfigError with one line
    per problem.
    """
    if path is None:
        return loads("", name="defaults", environment=environment, flags=flags)
    return loads(_text(FilePath(path)), name=str(path), environment=environment, flags=flags)


def loads(
    text: str,
    *,
    name: str = "config",
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """The same from TOML text that `name` calls in messages."""
    environment = os.environ if environment is None else environment
    data = _parse(text, name)
    sources = _Sources(name, text)
    faults = _overlay_environment(data, environment, sources)
    _overlay_flags(data, flags or {}, sources)
    warned = [_without_effect(path) for path in LATER if _present(data, path)]
    warned += _optional_token(data, environment)
    reader = Reader(environment)
    config = reader.section(Config, _with_preset(data), ())
    found = faults + reader.problems
    if config is not None:
        found += check.problems(config)
    if found or config is None:
        raise ConfigError("\n".join(dict.fromkeys(sources.message(problem) for problem in found)))
    warned += check.warnings(config)
    return Loaded(config, tuple(sources.message(problem) for problem in warned))


def _text(path: FilePath) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check path and rights") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes; is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text; save it as UTF-8") from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        line = int(place[1]) if place else text.count("\n") + 1
        reason = message[: place.start()] if place else message.removesuffix(" (at end of document)")
        column = f" at column {place[2]}" if place else " at the end of the file"
        raise ConfigError(f"{name}:{line}: is not valid TOML{column}: {reason}; correct the line") from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply; a config needs four levels") from None


def _overlay_environment(data: dict[str, Any], environment: Mapping[str, str], sources: _Sources) -> list[Problem]:
    """Put `FOREBAY_SECTION__FIELD` variables over the file's values; what fits nowhere is reported."""
    faults: list[Problem] = []
    for variable in sorted(environment):
        names = variable.removeprefix(PREFIX).lower().split("__")
        if not variable.startswith(PREFIX) or (len(names) == 1 and names[0] not in LISTS):
            continue
        path: Path = tuple(int(part) if part.isdigit() else part for part in names)
        sources.origins[path] = f"environment {variable}"
        reason = _put(data, path, Text(environment[variable]))
        if reason:
            faults.append(Problem(path, reason, "correct the variable's name, or unset it"))
    return faults


def _overlay_flags(data: dict[str, Any], flags: Mapping[str, object], sources: _Sources) -> None:
    for name, value in flags.items():
        if value is not None:
            path: Path = tuple(name.split("."))
            sources.origins[path] = FLAGS.get(path, f"flag {name}")
            _put(data, path, Text(value) if type(value) is str else value)


def _put(data: dict[str, Any], path: Path, value: object) -> str | None:
    """Set the value at `path`, making tables on the way. Returns why that cannot be done."""
    holder: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(holder, list) and isinstance(part, int):
            if part >= len(holder):
                return f"names item {part} of a list of {len(holder)}"
            name: Any = part
        elif isinstance(holder, dict):
            # Names in the file may have any case; names of variables are upper-case by custom.
            name = next((key for key in holder if key.lower().replace("-", "_") == str(part)), str(part))
        else:
            return "names a field of something that is no table"
        if last:
            holder[name] = value
        else:
            empty: Any = [] if isinstance(path[depth + 1], int) else {}
            holder = holder[name] if isinstance(holder, list) else holder.setdefault(name, empty)
    return None


def _with_preset(data: dict[str, Any]) -> dict[str, Any]:
    admission = data.get("admission")
    preset = admission.get("preset") if isinstance(admission, dict) else None
    beneath = PRESETS.get(preset) if isinstance(preset, str) else None
    return data if beneath is None else _merged(beneath, data)


def _merged(beneath: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(beneath)
    for name, value in above.items():
        under = result.get(name)
        result[name] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result


def _present(data: Mapping[str, Any], path: Iterable[str | int]) -> bool:
    holder: Any = data
    for part in path:
        if not isinstance(holder, dict) or part not in holder:
            return False
        holder = holder[part]
    return True


def _without_effect(path: Path) -> Problem:
    return Problem(path, "is accepted, but has no effect in this version", "remove it, or wait for its capability")


def _optional_token(data: dict[str, Any], environment: Mapping[str, str]) -> list[Problem]:
    """On loopback admin tokens are optional, so a reference to a variable that is not set means none."""
    admin = data.get("admin")
    if not isinstance(admin, dict) or not check.is_loopback(str(admin.get("host", "127.0.0.1"))):
        return []
    problems = []
    for name, without in (("token", "the admin port asks for no token"), ("read_token", "there is no such token")):
        token = admin.get(name)
        if isinstance(token, str) and token.startswith("env:") and not environment.get(token[4:]):
            del admin[name]
            reason = f"environment variable {token[4:]!r} is not set, so {without}"
            problems.append(Problem(("admin", name), reason, "export it to have one"))
    return problems


def _spelt(path: Path) -> tuple[str, str]:
    """A path as `[section]` and `field`."""
    if not path:
        return "", ""
    items = [place for place, part in enumerate(path) if isinstance(part, int) and place < 3]
    if path[0] in ("engines", "routes") or path[:2] == ("keys", "static"):
        names = path[: items[0]] if items else path
        return f"[[{'.'.join(map(str, names))}]]", _dotted(path[len(names) + 1 :])
    size = 2 if path[0] in ("classes", "limits") else 1
    return f"[{'.'.join(map(str, path[:size]))}]", _dotted(path[size:])


def _on_one_line(text: str) -> str:
    """The text with line breaks and other control characters escaped: one problem is one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _dotted(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
