"""The real engines of the calibration benchmark: how each is started, and the limits that it was started with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.peers import ROOT
from benchmarks.process import Process, free_port
from forebay.engines.simulated.model import EngineLimits
from forebay.load.child import get
from forebay.load.probing import Bounds
from forebay.load.target import Target
from forebay.load.workload import WORDS

if TYPE_CHECKING:
    from collections.abc import Mapping

START_S: Final = 180.0

# One thread for the model: the other core is for the load, so that measuring does not slow what is measured.
_VLLM_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """`what` is for people; `command` gives the arguments for a folder and a port."""

    name: str
    what: str
    limits: EngineLimits
    bounds: Bounds
    command: Callable[[Path, int], list[str]]
    environment: Mapping[str, str]

    def start(self, folder: Path, say: Callable[[str], None]) -> tuple[Process, Target]:
        """Starts it and waits until it serves. Raises StartError when it does not."""
        port = free_port()
        say(f"starting {self.what}")
        process = Process.start(self.name, self.command(folder, port), folder, self.environment)
        target = Target.parse(f"http://127.0.0.1:{port}")
        try:
            process.wait_until(lambda: _healthy(target), START_S)
        except BaseException:
            process.stop()
            raise
        return process, target


def _healthy(target: Target) -> bool:
    try:
        return get(target, "/health")[0] == 200
    except OSError:
        return False


EMBEDDED_SLOTS, EMBEDDED_CONTEXT = 16, 512
VLLM_SEQS, VLLM_BATCHED, VLLM_LENGTH = 8, 512, 1024


def _embedded(folder: Path, port: int) -> list[str]:  # noqa: ARG001
    sizes = {"--port": port, "--slots": EMBEDDED_SLOTS, "--context": EMBEDDED_CONTEXT, "--threads": 1}
    flags = [str(word) for pair in sizes.items() for word in pair]
    return [sys.executable, "-c", "from forebay.cli import main; main()", "engine", "embedded", *flags]


def _vllm(folder: Path, port: int) -> list[str]:
    import subprocess

    from tests.peers.rig import install

    python = str(install.install(lambda line: print(line, file=sys.stderr)))
    model = folder / "model"
    words = list(dict.fromkeys(WORDS))
    script = str(ROOT / "benchmarks" / "calibration_model.py")
    # -P: what lies beside the script must not shadow modules.
    subprocess.run([python, "-P", script, str(model), *words], check=True, stdout=subprocess.DEVNULL)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "wide"]
    command += ["--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", str(VLLM_LENGTH), "--max-num-seqs", str(VLLM_SEQS)]
    command += ["--max-num-batched-tokens", str(VLLM_BATCHED), "--no-enable-prefix-caching"]
    # Without a worker process of its own, which would wait for the engine core by spinning.
    return [*command, "--distributed-executor-backend", "uni"]


ENGINES: Final = {
    engine.name: engine
    for engine in (
        Engine(
            "embedded",
            f"the embedded engine (SmolLM2-135M, {EMBEDDED_SLOTS} slots, one thread)",
            # Its scheduler's own numbers: 128 prompt tokens in a step of prompts, 64 in all beside answers.
            EngineLimits(EMBEDDED_SLOTS, 128, EMBEDDED_SLOTS * EMBEDDED_CONTEXT, max_mixed_tokens=64),
            Bounds(EMBEDDED_SLOTS, EMBEDDED_CONTEXT, 256),
            _embedded,
            {},
        ),
        Engine(
            "vllm",
            f"vLLM 0.32 for CPU (random Llama of 35 M weights, {VLLM_SEQS} sequences, one thread)",
            EngineLimits(VLLM_SEQS, VLLM_BATCHED, 1 << 17),
            Bounds(VLLM_SEQS, VLLM_LENGTH, 768),
            _vllm,
            _VLLM_ENVIRONMENT,
        ),
    )
}
