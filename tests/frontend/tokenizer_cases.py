"""What the tests of tokenizers share: texts, and a byte-level BPE trained on a corpus that every Python has."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

from surefoot.config.engine_plan import CheckpointRef
from surefoot.frontend.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    inspect.getsource(argparse),
    "1234567 2024 1999\n" * 50,
    "naïve café, 12 345 кот 文字 🦙🦙 it's IT'S we'll",
    "\n\n\t \r\n",
]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two leading, two trailing  ",
    "a\n\n12 b  12 x   3",
    "1234567 3.14 ½ ²",
    "tabs\tand\r\nline  ends\n\n\n",
    "it's IT'S we'll don't O'REILLY",
    "naïve café 文字列 кот עברית 🦙👩‍👩‍👧 e\u0301",
    "def f(x):\n    return x[0] != -1  # ok",
    "<bos>text<|end|>\n<|end|>",
    "\x00\x7f\ufeff\u200b",
    "x" * 300 + " " * 50,
]
WORDS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
                    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
                    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
                ),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]


def train_byte_level(words: str = "gpt-2") -> tokenizers.Tokenizer:
    """A byte-level BPE with the special tokens <bos> (id 0) and <|end|> (id 1), which adds <bos>."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = WORDS[words]
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<bos>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return backend


def load_directory(directory: Path) -> Tokenizer:
    return load_tokenizer(CheckpointRef(str(directory), "safetensors"))
