"""Make a random-weight Llama for the calibration benchmark. Run by vLLM's interpreter: `calibration_model.py FOLDER`.

Wider than the model of the tests, so that a step is model time and not vLLM's bookkeeping, as on a GPU. Every token is
a whole word: a model of chance otherwise begins characters that it never ends, and a client then sees its first token
late. The weights are vLLM's own dummies (`--load-format dummy`), so there is nothing to download or to store.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

VOCABULARY = 4096
CONTEXT = 4096
WIDTH, HIDDEN, LAYERS, HEADS = 512, 1376, 12, 8
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    fillers = [f"w{number}" for number in range(VOCABULARY - len(SPECIAL) - len(words))]
    vocabulary = {word: number for number, word in enumerate(SPECIAL + words + fillers)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    unknown, begin, end, padding = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        pad_token=padding,
        model_max_length=CONTEXT,
    )


def make_config() -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=CONTEXT,
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
        pad_token_id=SPECIAL.index("<pad>"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


if __name__ == "__main__":
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    make_config().save_pretrained(folder)
    make_tokenizer(words).save_pretrained(folder)
