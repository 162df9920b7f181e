"""A sweep on a real Ray of two workers gives the bytes that a sweep here gives, and Ray stays on the loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".venv-peers-ray"
STAMP = HOME / "installed"
RAY = "ray==2.60.0"
SCRIPT = Path(__file__).with_name("rig") / "ray_sweep.py"

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same inside IPv6, and ::1, as the kernel prints them."""


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter of its own with Ray (250 MB, kept between runs)."""
    wanted = f"{RAY} {sys.version_info.major}.{sys.version_info.minor}"
    interpreter = HOME / "bin" / "python"
    if not (STAMP.is_file() and STAMP.read_text() == wanted):
        shutil.rmtree(HOME, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True, timeout=120)
        install = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-input"]
        subprocess.run([*install, RAY, "-e", str(ROOT)], check=True, timeout=600)
        STAMP.write_text(wanted)
    return interpreter


def test_ray_gives_the_same_bytes(python: Path) -> None:
    # -P: what lies beside the script must not shadow modules.
    done = subprocess.run(
        [str(python), "-P", str(SCRIPT)], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["same"]
    assert found["runs"] == 6
    assert found["listening"], "nothing was listening: was this Ray?"
    assert set(found["listening"]) <= LOOPBACK
