"""vLLM is installed once per session; each module that needs a server gets one of its own, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.rig.gateway import StartGateway, started

from .rig import install
from .rig.vllm import VllmServer

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
    with started(tmp_path) as start:
        yield start
