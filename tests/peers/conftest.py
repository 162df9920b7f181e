"""vLLM is installed once per session; each module that needs a server gets one of its own, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import GatewayProcess

from .rig import install
from .rig.vllm import VllmServer

StartGateway = Callable[..., GatewayProcess]
MakeVllm = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def vllm_installed(pytestconfig: pytest.Config) -> None:
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", end="", file=sys.stderr, flush=True)

    install.install(say)


@pytest.fixture(scope="module")
def make_vllm(vllm_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeVllm]:
    """Make servers, not started yet; at the end of the module all are killed."""
    made: list[VllmServer] = []

    def make(*flags: str) -> VllmServer:
        server = VllmServer(tmp_path_factory.mktemp("vllm"), *flags)
        made.append(server)
        return server

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[StartGateway]:
    """Start gateways from configs; at the end each must stop with status 0 and without a traceback."""
    started: list[GatewayProcess] = []

    def start(config: Mapping[str, Any], *, ready: bool = True) -> GatewayProcess:
        gateway = GatewayProcess(config, tmp_path / f"gateway-{len(started)}", ready=ready)
        started.append(gateway)
        return gateway

    yield start
    try:
        for gateway in started:
            gateway.stop()
    finally:
        for gateway in started:
            gateway.kill()
