"""The documentation names what exists: commands, settings, make targets, policies; and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from forebay.cli import COMMANDS, group
from forebay.config.render import tables
from forebay.core import batching, limits, tuning
from forebay.core.dispatch import balance
from forebay.ingress.http.routes import EXACT
from forebay.ingress.status import TABLE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/*.md")])
POLICIES = sorted(path for path in DOCS.glob("policies/*.md") if path.stem != "index")
ADRS = sorted(DOCS.glob("adr/*.md"))
CONTEXT = click.Context(group)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target}: no such file"
        assert found.is_relative_to(ROOT), f"{target}: outside the project"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{target}: no such heading; there are {sorted(anchors(found))}"


def test_every_page_is_found_from_the_index() -> None:
    """Policies have an index of their own."""
    index = (DOCS / "index.md").read_text("utf-8")
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "policies"]
    missing = [page for page in pages if page != "index.md" and f"({page}" not in index]
    assert not missing, f"not in docs/index.md: {missing}"


def test_every_command_is_documented() -> None:
    page = (DOCS / "index.md").read_text("utf-8")
    missing = [command for command in COMMANDS if f"`forebay {command}`" not in page]
    assert not missing, f"not in docs/index.md: {missing}"


def test_commands_that_the_pages_show_exist() -> None:
    for page in PAGES:
        for command in re.findall(r"(?:\$ |`)forebay ([a-z]+)", page.read_text("utf-8")):
            assert command in COMMANDS, f"{name(page)}: forebay {command}"


def shown(page: Path) -> Iterator[list[str]]:
    """The words of every call of `forebay` that stands in a line of a console, or between backticks."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    for line in re.findall(r"(?:\$ |`|\$\()(forebay [^`\n]*)", text):
        yield shlex.split(line.split("  #")[0].replace("'", '"').rstrip(" &)"), comments=False)[1:]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_that_the_pages_show_exist(page: Path) -> None:
    for words in shown(page):
        command: click.Command = group
        while isinstance(command, click.Group) and words and (inner := command.get_command(CONTEXT, words[0])):
            command, words = inner, words[1:]
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        asked = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)} - {"--help", "--version"}
        assert asked <= known, f"{command.name} has no {sorted(asked - known)}"


def test_every_section_of_the_configuration_is_documented() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    missing = [table.header for table in tables() if f"### `{table.header}`" not in page]
    assert not missing, f"run: python -m forebay.config.render --docs (missing: {missing})"


def test_every_route_is_documented() -> None:
    page = (DOCS / "index.md").read_text("utf-8")
    missing = [
        path.decode() for path in EXACT if f"`{path.decode()}`" not in page and not path.startswith(b"/v1/audio/")
    ]
    assert not missing, f"not in docs/index.md: {missing}"


def test_every_reason_is_documented() -> None:
    page = (DOCS / "adr" / "0004-429-and-503.md").read_text("utf-8")
    missing = [reason for reason in TABLE if f"`{reason}`" not in page]
    assert not missing, f"not in docs/adr/0004-429-and-503.md: {missing}"
    for reason, status in re.findall(r"^\| `(\w+)` \| (\d{3})", page, re.MULTILINE):
        assert TABLE[reason].status == int(status), f"{reason} is answered {TABLE[reason].status}"


def test_make_targets_that_the_pages_show_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:\$ |`)make ([a-z-]+)", page.read_text("utf-8")):
            assert target in targets, f"{name(page)}: make {target}"


@pytest.mark.parametrize("page", POLICIES, ids=name)
def test_policies_have_the_same_sections(page: Path) -> None:
    sections = re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)
    assert sections == ["Behaviour", "Inputs", "Configuration", "Trade-offs", "When not to use"]
    assert f"({page.name})" in (DOCS / "policies" / "index.md").read_text("utf-8"), "not in docs/policies/index.md"


def test_every_policy_of_a_room_has_its_page() -> None:
    pages = {page.stem for page in POLICIES}
    assert {f"batching-{kind}" for kind in batching.POLICIES} <= pages
    assert {f"limit-{kind}" for kind in limits.POLICIES} <= pages
    assert {f"balance-{kind}" for kind in balance.POLICIES} <= pages
    assert {f"depth-{kind}" for kind in tuning.POLICIES} <= pages


@pytest.mark.parametrize("page", ADRS, ids=name)
def test_decisions_have_the_same_sections(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.startswith(f"# {page.name[:4]} ")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections == ["Context", "Decision", "Consequences", "What would change it"]
    assert f"(adr/{page.name})" in (DOCS / "index.md").read_text("utf-8"), "not in docs/index.md"


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [page.name[:4] for page in ADRS] == [f"{number:04}" for number in range(1, len(ADRS) + 1)]
