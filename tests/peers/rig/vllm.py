"""A real vLLM server on the CPU: a process group that can be drained, killed and started again on its port."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.faults.rig.waiting import eventually

from .install import MODEL, python

MODEL_NAME = "tiny"
START_LIMIT_S = 180.0
PROBED = {"probe": {"interval_s": 0.2, "timeout_s": 2.0}}
"""Engine settings of a gateway before vLLM: asked often, though with the usual patience."""

# One OpenMP thread: the gateway, the clients and vLLM's processes share few cores, and spinning threads would
# take them from each other. Nothing is looked up on the network.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
# Without a worker process of its own: the engine core and a worker wait for each other by spinning, and on two cores
# that left vLLM's HTTP server without a turn for seconds.
COMMON_FLAGS = (
    "--max-model-len", "4096", "--max-num-seqs", "4", "--enforce-eager", "--distributed-executor-backend", "uni",
)  # fmt: skip


class VllmServer:
    """One address on which a vLLM is now and then running."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = _free_port()
        self._folder = folder
        self._flags = flags
        self._starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---- its life

    def launch(self) -> None:
        """Start the process without waiting for it to be ready."""
        assert not self.alive, "it is running"
        self._starts += 1
        # The command `vllm` looks for a distribution of that name, and this one is called vllm-cpu.
        command = [str(python()), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(MODEL), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *COMMON_FLAGS, *self._flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))} | ENVIRONMENT
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=self._folder, start_new_session=True
            )

    def wait_ready(self) -> float:
        """Wait until it is ready; returns how long that took, in seconds."""
        began = time.monotonic()

        def ready() -> bool:
            assert self.alive, f"vLLM ended with {self.process and self.process.returncode}: {self.log[-3000:]}"
            return self.health() == 200

        eventually(ready, within=START_LIMIT_S, what="vLLM ready")
        return time.monotonic() - began

    def start(self) -> None:
        """Start it and wait until it is ready; nothing when it is running."""
        if not self.alive:
            self.kill()
            self.launch()
            self.wait_ready()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def terminate(self) -> None:
        """SIGTERM to the server process, as an orchestrator sends it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait_gone(self, within: float = 40.0) -> None:
        assert self.process is not None
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"vLLM did not end within {within} s: {self.log[-3000:]}") from None
        self.kill()

    def kill(self) -> None:
        """End the whole group: the engine core is a process of its own."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    # ---- what can be seen of it

    @property
    def log_path(self) -> Path:
        return self._folder / f"vllm-{self._starts}.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def request(self, method: str, path: str, body: Any = None, timeout: float = 10.0) -> tuple[int, bytes]:
        """Straight to vLLM, past the gateway."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def health(self) -> int | None:
        """The status of /health, None without an answer."""
        try:
            return self.request("GET", "/health", timeout=2)[0]
        except OSError:
            return None

    def metrics(self, *names: str) -> tuple[float, ...]:
        """Each metric's samples summed up, of one and the same scrape; 0 for a metric that is not there."""
        status, text = self.request("GET", "/metrics")
        assert status == 200
        sums = dict.fromkeys(names, 0.0)
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
        return tuple(sums.values())

    def load(self) -> tuple[float, ...]:
        """(running, waiting) requests."""
        return self.metrics("vllm:num_requests_running", "vllm:num_requests_waiting")

    def tokens(self) -> tuple[float, ...]:
        """(prompt tokens, generated tokens) since its start."""
        return self.metrics("vllm:prompt_tokens_total", "vllm:generation_tokens_total")

    def rejections(self) -> float:
        """Requests that it refused because it was busy, since its start."""
        return self.metrics("vllm:admission_rejections_total")[0]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert isinstance(port, int)
        return port


def prompt_of(tokens: int) -> list[int]:
    """A prompt of so many token ids that no prefix cache knows."""
    return [random.randrange(10, 4000) for _ in range(tokens)]
