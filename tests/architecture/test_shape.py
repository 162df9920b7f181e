"""Sizes, purity and docstrings, read from the source itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "forebay"
CORE = SOURCE / "core"
FILE_LINES_MAX, CORE_LINES_MAX, PIPELINE_LINES_MAX, FUNCTION_LINES_MAX = 600, 300, 600, 70

FILES = sorted(SOURCE.rglob("*.py"))
CORE_FILES = [path for path in FILES if CORE in path.parents]


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_one_thing_and_functions_a_screen(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    if path.name == "pipeline.py" and path.parent == CORE:
        most = PIPELINE_LINES_MAX
    else:
        most = CORE_LINES_MAX if CORE in path.parents else FILE_LINES_MAX
    assert lines <= most, f"{lines} lines, at most {most}"
    for function in functions(ast.parse(text)):
        # From its first statement: the parameters of a command are a declaration, one line each.
        length = (function.end_lineno or function.lineno) - function.body[0].lineno + 1
        assert length <= FUNCTION_LINES_MAX, f"{function.name} has {length} lines, at most {FUNCTION_LINES_MAX}"


@pytest.mark.parametrize("path", CORE_FILES, ids=name)
def test_the_core_reads_neither_clock_nor_chance_nor_address(path: Path) -> None:
    """Time and chance are passed in; `id` and `hash` differ from run to run, and so would an order by them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"id", "hash", "open", "print", "input"}, f"line {node.lineno}"
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            pytest.fail(f"line {node.lineno}: the core is synchronous")


@pytest.mark.parametrize("path", CORE_FILES, ids=name)
def test_no_order_depends_on_a_set(path: Path) -> None:
    """A set may be asked what it holds, never walked: its order is not part of the trace."""
    tree = ast.parse(path.read_text())
    asked: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and all(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            asked.update(id(comparator) for comparator in node.comparators)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "frozenset":
            asked.update(id(argument) for argument in node.args)
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and "frozenset" in ast.dump(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.SetComp):
            assert id(node) in asked, f"line {node.lineno}: a set that is not only asked"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "set", f"line {node.lineno}: a set that may be walked"
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Name):
            assert node.iter.id not in constants, f"{node.iter.id} is walked"


def documented_by_protocols() -> set[str]:
    """Methods whose meaning a protocol of the core states; implementations need not repeat it."""
    found = set()
    for path in CORE_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(b, ast.Name) and b.id == "Protocol" for b in node.bases
            ):
                found |= {method.name for method in functions(node) if ast.get_docstring(method)}
    return found


@pytest.mark.parametrize("path", CORE_FILES, ids=name)
def test_everything_public_in_the_core_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module without a docstring"
    elsewhere = documented_by_protocols()
    missing = [
        f"{node.name} (line {node.lineno})"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and node.name not in elsewhere
        and not ast.get_docstring(node)
    ]
    assert not missing, f"no docstring: {', '.join(missing)}"


def test_names_hide_nothing() -> None:
    vague = re.compile(r"manager|helper|utils?$|misc|common$")
    found = [name(path) for path in FILES if any(vague.search(part) for part in path.with_suffix("").parts[-3:])]
    assert not found, f"a name that says nothing: {found}"


def test_policies_are_one_file_each_and_listed() -> None:
    """A policy is a class with a config of its own kind, in the room's POLICIES; nothing registers itself."""
    from forebay.core import batching, limits, tuning
    from forebay.core.dispatch import balance

    for room in (batching, limits, balance, tuning):
        for kind, policy in room.POLICIES.items():
            module = policy.__module__.rsplit(".", 1)[-1]
            assert module == kind, f"{kind} lives in {module}.py"


def test_invariants_are_numbered_as_the_kit_checks_them() -> None:
    """Every number that the kit or the state machine names is explained, and none is explained twice."""
    numbers = [int(n) for n in re.findall(r"^## (\d+)\. ", (ROOT / "docs" / "invariants.md").read_text(), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    kit = (SOURCE / "testing" / "invariants.py").read_text()
    checked = {int(n) for n in re.findall(r"_hold\(\s*(\d+)", kit)}
    assert checked <= set(numbers)
