"""Make a tiny random-weight Llama with a tokenizer of its own, for a server that must be real but need not be clever.

Run by the interpreter that has vLLM, torch and transformers: `python tiny_model.py FOLDER`. Nothing is downloaded: the
tokenizer is trained on the standard library's source, and the weights are seeded chance (3.9 M parameters).
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
HIDDEN = 256
LAYERS = 4
HEAD_DIM = 64
CONTEXT = 4096
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    corpus = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in corpus], trainer)
    unknown, begin, end, padding = SPECIAL
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        pad_token=padding,
        model_max_length=CONTEXT,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = HIDDEN // HEAD_DIM
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 8 // 3 // 32 * 32,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
        pad_token_id=SPECIAL.index("<pad>"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
