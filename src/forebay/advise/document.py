"""The recommendation as a commented configuration file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from forebay.advise.answers import Answers
from forebay.advise.recommend import Recommendation
from forebay.config.render import toml

WIDTH = 110


def config_file(answers: Answers, advice: Recommendation) -> str:
    """TOML text that `forebay config check` accepts; every setting has its reason above it."""
    lines = [f"# Advised for {answers.clients} clients: {advice.mode.value} mode."]
    lines += _comment(*advice.reasons, *(f"Mind: {caution}" for caution in advice.cautions))
    if advice.assumed:
        lines += _comment(f"Assumed, since not said: {', '.join(advice.assumed)}.")
    section = ""
    for setting in advice.settings:
        if setting.section != section:
            section = setting.section
            lines += ["", "[[engines]]" if section == "engines" else f"[{section}]"]
        inline = isinstance(setting.value, str) and setting.value.startswith("{")
        lines += [*_comment(setting.why), f"{setting.name} = {setting.value if inline else toml(setting.value)}"]
    if advice.preset in ("b2b", "public-api"):
        lines += ["", *_example_key(answers, advice)]
    missing = [f"- {one.what} ([{one.setting}]), {one.when}" for one in advice.later if not one.available]
    now = [f"- {one.what} ({one.setting}), {one.when}" for one in advice.later if one.available]
    if now:
        lines += ["", "# To add later, with this version:", *_comment(*now)]
    if missing:
        lines += ["", "# To add later, with a version that has it:", *_comment(*missing)]
    return "\n".join(lines) + "\n"


def _example_key(answers: Answers, advice: Recommendation) -> Iterator[str]:
    """A caller with an even share of the capacity, commented: its secret is not ours to invent."""
    share = ""
    if advice.capacity is not None and answers.prompt_tokens and answers.output_tokens:
        customers = answers.customers or 10
        tokens = advice.capacity.rate_per_s * (answers.prompt_tokens + answers.output_tokens) / customers
        share = f"tokens_per_second = {max(1, round(tokens))}, "
        yield from _comment(
            f"A key for each caller. Its envelope is a share of one in {customers} of the capacity; what it may have "
            "open at once is bounded too. Remove the marks, and export TEAM_A_KEY."
        )
    else:
        yield from _comment("A key for each caller, with its own limits. Remove the marks, and export TEAM_A_KEY.")
    yield "#[[keys.static]]"
    yield '#id = "team-a"'
    yield '#secret = "env:TEAM_A_KEY"'
    yield f"#limits = {{ {share}requests_per_minute = 600, concurrency = 8 }}"


def _comment(*paragraphs: str) -> list[str]:
    lines: list[str] = []
    for text in paragraphs:
        indent = "#   " if text.startswith("- ") else "# "
        lines += textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent=indent)
    return lines
