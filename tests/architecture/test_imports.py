"""The contracts of `.importlinter`: the core is pure, the rooms are independent, the layers hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]


def test_import_contracts(capsys: pytest.CaptureFixture[str]) -> None:
    status = lint_imports(config_filename=str(ROOT / ".importlinter"), no_cache=True, no_logo=True)
    assert status == 0, capsys.readouterr().out


def test_the_contracts_name_every_package() -> None:
    """A package that no contract knows would be bound by none."""
    contracts = (ROOT / ".importlinter").read_text()
    layers = contracts.split("[importlinter:contract:layers]")[1].split("[importlinter:")[0]
    source = ROOT / "src" / "forebay"
    packages = {p.parent.name for p in source.glob("*/__init__.py")} - {"testing"}
    modules = {p.stem for p in source.glob("*.py")} - {"__init__", "__main__"}
    missing = {name for name in packages | modules if f"forebay.{name}" not in layers.replace("|", " ").split()}
    assert not missing, f"add to the layers: {sorted(missing)}"
