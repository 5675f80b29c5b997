"""How byte-level BPE splits text into words before it merges: in a GGUF file this goes by a name.

The names are llama.cpp's; the rules are those of the Hugging Face tokenizer that the name stands for, Unicode
normalisation included. A name is listed only if its rules are known to the letter.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# A word of mixed case is cut before its second capital: its head is upper case, its tail lower case.
_MARK, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_MARK}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
QWEN2_PATTERN = rf"{_CONTRACTIONS}|{_MARK}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
QWEN35_PATTERN = rf"{_CONTRACTIONS}|{_MARK}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
TEKKEN_PATTERN = rf"{_MARK}{_UPPER}*{_LOWER}+|{_MARK}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
GPT4O_PATTERN = (
    rf"{_MARK}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_MARK}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
# One after the other: numbers, Chinese and Japanese, everything else.
DEEPSEEK3_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)


class Words(NamedTuple):
    """How text is split into words before merging, and what a converter leaves unsaid with it."""

    split: pre_tokenizers.PreTokenizer
    composes: bool = False  # text is brought into Unicode's normal form C first
    ignore_merges: bool = False  # a word that is a token is taken whole: some tokens no sequence of merges reaches
    adds_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS_SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2_SPLIT])
_LLAMA3_SPLIT = _split(LLAMA3_PATTERN)

_GPT2 = Words(_GPT2_SPLIT)
_DIGITS = Words(_DIGITS_SPLIT)
_LLAMA3 = Words(_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
_QWEN2 = Words(_split(QWEN2_PATTERN), composes=True)
_GPT4O = Words(_split(GPT4O_PATTERN))

# by the value of tokenizer.ggml.pre
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": Words(_GPT2_SPLIT, composes=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "command-r": Words(_DIGITS_SPLIT, composes=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": Words(_LLAMA3_SPLIT),
    "glm4": Words(_LLAMA3_SPLIT),
    "chatglm-bpe": Words(_LLAMA3_SPLIT),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Words(_split(QWEN35_PATTERN), composes=True),
    "tekken": Words(_split(TEKKEN_PATTERN), ignore_merges=True, adds_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-v3": Words(_split(*DEEPSEEK3_PATTERNS)),
}
