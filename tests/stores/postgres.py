"""A PostgreSQL server of our own: the one of the machine, or else the system's package, installed here."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from itertools import count
from pathlib import Path

START_S = 60
INSTALL_S = 600


class Postgres:
    """One server on a free port of the loopback, until `remove`. `url` makes a new database."""

    def __init__(self) -> None:
        # Not pytest's own folder: nobody but its owner may enter that, and the server refuses to run as root.
        self._home = tempfile.TemporaryDirectory(prefix="forebay-postgres-")
        self._folder, self._bin = Path(self._home.name) / "data", _programs()
        self._numbers = count(1)
        self._folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            self._folder.parent.chmod(0o711)
            shutil.chown(self._folder, "postgres", "postgres")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._run("initdb", "-A", "trust", "-U", "postgres", "-N", "-D", str(self._folder))
        self.start()

    def start(self) -> None:
        options = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-w", "-t", str(START_S), "-D", str(self._folder), "-o", options, "-l", log, "start")

    def stop(self) -> None:
        """At once: whoever is connected loses the connection."""
        self._run("pg_ctl", "-w", "-D", str(self._folder), "-m", "immediate", "stop")

    def remove(self) -> None:
        self.stop()
        self._home.cleanup()

    def url(self) -> str:
        name = f"forebay_{next(self._numbers)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", name)
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def drop(self, url: str) -> None:
        """Remove the database of this URL: hundreds of them take a minute to remove at the end."""
        name = url.rsplit("/", 1)[1]
        self._run("dropdb", "--force", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", name)

    def _run(self, program: str, *arguments: str) -> None:
        user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        with (self._folder.parent / "commands").open("a+b") as said:  # a pipe would be kept open by the server
            done = subprocess.run(
                [str(self._bin / program), *arguments],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd="/", timeout=START_S + 10, check=False, **user,
            )  # fmt: skip
            said.seek(0)
            assert done.returncode == 0, f"{program} failed: {said.read()[-2000:].decode(errors='replace')}"


def _programs() -> Path:
    found = _installed()
    if found is None:
        for step in (
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-yq", "--no-install-recommends", "postgresql"],
        ):
            done = subprocess.run(step, capture_output=True, timeout=INSTALL_S, check=False)
        found = _installed()
        assert found is not None, f"no PostgreSQL, and none to install: {done.stderr[-2000:].decode(errors='replace')}"
    return found


def _installed() -> Path | None:
    if (on_path := shutil.which("initdb")) is not None:
        return Path(on_path).resolve().parent
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
