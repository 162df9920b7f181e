"""Real tokenizers that judge an estimate, and the tokens that a chat template adds to their counts.

quicktok bundles its vocabularies and mistral-common brings its own: nothing is downloaded when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

Judge = Callable[[Sequence[str]], int]
"""Prompt tokens of a chat with these contents."""

MESSAGE_TOKENS: Final = 4  # role, and the marks around a message, as ChatML and the Llama template have them
CHAT_TOKENS: Final = 3  # the beginning, and the head of the answer
BUNDLED: Final = {"o200k": "o200k_base", "cl100k": "cl100k_base", "llama3": "llama3", "qwen3": "qwen3"}


def _chat(count: Callable[[str], int]) -> Judge:
    return lambda contents: CHAT_TOKENS + sum(MESSAGE_TOKENS + count(content) for content in contents)


def judges() -> dict[str, Judge]:
    """All judges by the name of their tokenizer."""
    import mistral_common
    import quicktok
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    found = {name: _chat(quicktok.get_encoding(encoding).count) for name, encoding in BUNDLED.items()}
    data = Path(mistral_common.__file__).parent / "data"
    tekken = Tekkenizer.from_file(str(data / "tekken_240911.json"))
    found["tekken"] = _chat(lambda text: len(tekken.encode(text, bos=False, eos=False)))
    return found
