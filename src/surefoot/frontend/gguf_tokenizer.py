"""The tokenizer that a GGUF file's metadata describes, built with the `tokenizers` library.

Two models occur in the supported family:

    gpt2   byte-level BPE: vocabulary and merges in the file; how text is split into words goes by a name
    llama  SentencePiece BPE: vocabulary with scores; merges follow from the scores, unknown characters become bytes

Every token has a kind. Control and user-defined tokens are found in text before anything else is done to it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from surefoot.checkpoint.errors import TokenizerError
from surefoot.checkpoint.gguf import GGUFFile


class _Kind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# A model may end a turn with one of these though its metadata names another one as end of text.
END_OF_TEXT_TOKENS = {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>"}


class _Words(NamedTuple):
    """How text is split into words before merging, and what a converter leaves unsaid with it."""

    split: pre_tokenizers.PreTokenizer
    ignore_merges: bool  # a word that is a token is taken whole: Llama 3 has words that no sequence of merges reaches
    adds_bos: bool  # unless tokenizer.ggml.add_bos_token says otherwise


_GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
_SMOLLM_SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2_SPLIT])

_GPT2_WORDS = _Words(_GPT2_SPLIT, ignore_merges=False, adds_bos=False)
_SMOLLM_WORDS = _Words(_SMOLLM_SPLIT, ignore_merges=False, adds_bos=False)
_LLAMA3_WORDS = _Words(_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)

# by the value of tokenizer.ggml.pre
PRE_TOKENIZERS = {
    "gpt-2": _GPT2_WORDS,
    "default": _GPT2_WORDS,  # written by converters that did not record the name
    "smollm": _SMOLLM_WORDS,
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
}


def read_backend(file: GGUFFile) -> Tokenizer:
    """Raises TokenizerError for a kind of tokenizer that is not supported."""
    model = file.value("tokenizer.ggml.model", str)
    if model == "gpt2":
        words = _words(file)
        backend, adds_bos = _byte_level_bpe(file, words), words.adds_bos
    elif model == "llama":
        backend, adds_bos = _sentencepiece_bpe(file), True
    else:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.model = {model!r} is not supported; supported are 'gpt2' and 'llama'"
        )
    _add_special_tokens(backend, file)
    _add_bos_and_eos(backend, file, adds_bos)
    return backend


def end_of_text_ids(file: GGUFFile) -> list[int]:
    named = [id_ for name, id_ in _special_ids(file).items() if name in ("eos", "eot", "eom")]
    tokens, kinds = file.array("tokenizer.ggml.tokens", str), _kinds(file)
    return named + [i for i, kind in enumerate(kinds) if kind == _Kind.CONTROL and tokens[i] in END_OF_TEXT_TOKENS]


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """The special tokens that a chat template may write: `bos_token` and so on."""
    tokens, names = file.array("tokenizer.ggml.tokens", str), {"padding": "pad", "unknown": "unk"}
    return {f"{names.get(name, name)}_token": tokens[id_] for name, id_ in _special_ids(file).items()}


def _special_ids(file: GGUFFile) -> dict[str, int]:
    """Name (such as "bos") -> token id, for those that the file names."""
    num_tokens = len(file.array("tokenizer.ggml.tokens", str))
    found = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in file.metadata:
            continue
        found[name] = file.value(key, int)
        if not 0 <= found[name] < num_tokens:
            raise TokenizerError(f"{file.path}: {key} = {found[name]} is not one of the {num_tokens} tokens")
    return found


def _vocab(file: GGUFFile) -> dict[str, int]:
    tokens = file.array("tokenizer.ggml.tokens", str)
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for id_, token in enumerate(tokens) if vocab[token] != id_)
        raise TokenizerError(f"{file.path}: the vocabulary has the token {twice!r} twice")
    return vocab


def _kinds(file: GGUFFile) -> list[int]:
    kinds, tokens = file.array("tokenizer.ggml.token_type", int), file.array("tokenizer.ggml.tokens", str)
    if len(kinds) != len(tokens):
        raise TokenizerError(
            f"{file.path} has {len(tokens)} tokens but {len(kinds)} entries in tokenizer.ggml.token_type"
        )
    return kinds


def _words(file: GGUFFile) -> _Words:
    name = file.value_or("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.pre = {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(file: GGUFFile, words: _Words) -> Tokenizer:
    merges = []
    for line in file.array("tokenizer.ggml.merges", str):
        left, space, right = line.partition(" ")
        if not space:
            raise TokenizerError(f"{file.path}: {line!r} in tokenizer.ggml.merges is not a pair")
        merges.append((left, right))
    try:
        backend = Tokenizer(models.BPE(vocab=_vocab(file), merges=merges, ignore_merges=words.ignore_merges))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{file.path}: vocabulary and merges do not fit together: {error}") from error
    backend.pre_tokenizer = words.split
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(file: GGUFFile) -> Tokenizer:
    vocab = _vocab(file)
    unknown = [token for token, kind in zip(vocab, _kinds(file), strict=True) if kind == _Kind.UNKNOWN]
    model = models.BPE(
        vocab=vocab,
        merges=_merges_from_scores(file, vocab),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    to_space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.value_or("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([*to_space, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(to_space)
    return backend


def _merges_from_scores(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union has the best score; a list of merges says the same.

    Every way to cut a token into two tokens is a merge, ranked by the score of the whole.
    """
    scores, kinds = file.array("tokenizer.ggml.scores", float), _kinds(file)
    if len(scores) != len(vocab):
        raise TokenizerError(f"{file.path} has {len(vocab)} tokens but {len(scores)} entries in tokenizer.ggml.scores")
    mergeable = {token: scores[id_] for token, id_ in vocab.items() if kinds[id_] == _Kind.NORMAL}
    by_score = sorted(mergeable, key=mergeable.__getitem__, reverse=True)
    merges = []
    for token in by_score:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in mergeable and pair[1] in mergeable]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


def _add_special_tokens(backend: Tokenizer, file: GGUFFile) -> None:
    tokens, kinds = file.array("tokenizer.ggml.tokens", str), _kinds(file)
    special = [tokens[i] for i, kind in enumerate(kinds) if kind in (_Kind.CONTROL, _Kind.UNKNOWN)]
    user_defined = [tokens[i] for i, kind in enumerate(kinds) if kind == _Kind.USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in user_defined])


def _add_bos_and_eos(backend: Tokenizer, file: GGUFFile, adds_bos: bool) -> None:
    """What `encode(add_special_tokens=True)` puts around a text."""
    ids, tokens = _special_ids(file), special_tokens(file)
    pieces = ["$A"]
    if file.value_or("tokenizer.ggml.add_bos_token", adds_bos and "bos" in ids):
        pieces.insert(0, _wanted(file, tokens, "bos"))
    if file.value_or("tokenizer.ggml.add_eos_token", False):
        pieces.append(_wanted(file, tokens, "eos"))
    used = [(tokens[f"{name}_token"], ids[name]) for name in ("bos", "eos") if name in ids]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=used)


def _wanted(file: GGUFFile, tokens: dict[str, str], name: str) -> str:
    if f"{name}_token" not in tokens:
        raise TokenizerError(f"{file.path}: tokenizer.ggml.add_{name}_token is set, but {name}_token_id is missing")
    return tokens[f"{name}_token"]
