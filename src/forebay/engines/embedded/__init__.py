"""The embedded engine: a small real language model on NumPy, with continuous batching.

It runs SmolLM2-135M-Instruct, or another GGUF file of the Llama architecture with a byte-level BPE tokenizer, so that a
newcomer has a real engine behind the gateway without a GPU. A 135 M model knows a few facts and makes up the rest: it
shows how serving behaves, it is no chat product. Embeddings are the mean of its final hidden states, unit length not
implied.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import EngineError, UsageError

if TYPE_CHECKING:
    from forebay.engines.embedded.engine import EmbeddedEngine

DEFAULT_SLOTS: Final = 32
DEFAULT_CONTEXT: Final = 512

_MAX_SLOTS: Final = 256
_THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def build(
    model_path: str | None = None,
    slots: int = DEFAULT_SLOTS,
    context: int = DEFAULT_CONTEXT,
    threads: int | None = None,
) -> EmbeddedEngine:
    """The engine, not started. The weights are fetched first when no path is given and they are not in the cache.

    `slots` sequences run at once, each of at most `context` tokens. `threads` is how many CPU threads the model uses,
    by default all that this process may. Call it before NumPy is imported: BLAS reads only then that it is to leave
    the threads to the engine, and is left alone with its own (slower) otherwise.

    Raises:
        UsageError: a number out of range, or a path that is no file.
        EngineError: NumPy is missing, or the weights cannot be fetched.
    """
    if not 1 <= slots <= _MAX_SLOTS:
        raise UsageError(f"slots is {slots}: give 1 to {_MAX_SLOTS}")
    if context < 16:
        raise UsageError(f"context is {context}: give at least 16 tokens")
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads}: give at least 1")
    if importlib.util.find_spec("numpy") is None:
        raise EngineError("the embedded engine needs NumPy: install it with `pip install 'forebay[embedded]'`")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(threads or available, available)
    path = Path(model_path) if model_path is not None else _weights()
    if not path.is_file():
        raise UsageError(f"model file {path} does not exist or is no file")

    if not pin_blas():
        threads = 1

    from forebay.engines.embedded.engine import MODEL_ID, EmbeddedEngine
    from forebay.engines.embedded.weights import cache_path

    return EmbeddedEngine(
        path,
        slots=slots,
        context=context,
        threads=threads,
        model_id=MODEL_ID if path == cache_path() else path.stem.lower(),
    )


def pin_blas() -> bool:
    """Keeps NumPy's BLAS to one thread; false when NumPy is imported already and was not kept to one."""
    if "numpy" not in sys.modules:
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    return os.environ.get("OPENBLAS_NUM_THREADS") == "1"


def _weights() -> Path:
    from forebay.engines.embedded.weights import fetch

    return fetch(lambda line: print(line, file=sys.stderr, flush=True))
