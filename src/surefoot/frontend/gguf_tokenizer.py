"""The tokenizer that a GGUF file's metadata describes, built with the `tokenizers` library.

tokenizer.ggml.model says which of three models it is:

    gpt2   byte-level BPE: vocabulary and merges in the file; how text is split into words goes by a name (gguf_words)
    llama  SentencePiece BPE: vocabulary with scores; merges follow from the scores, unknown characters become bytes
    t5     SentencePiece unigram: the tokens whose scores add up to the most

Every token has a kind (gguf_vocab). Control and user-defined tokens are found in text before anything else is done
to it.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from surefoot.checkpoint.errors import TokenizerError
from surefoot.checkpoint.gguf import GGUFFile
from surefoot.frontend.gguf_sentencepiece import sentencepiece_bpe, sentencepiece_unigram
from surefoot.frontend.gguf_vocab import GGUFVocab, TokenKind
from surefoot.frontend.gguf_words import PRE_TOKENIZERS, Words

# Phi 3's special tokens swallow the white space after them, but for these; GGUF has no field for that.
PHI3_NOT_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}


def read_backend(file: GGUFFile, vocab: GGUFVocab) -> Tokenizer:
    """Raises TokenizerError for a kind of tokenizer that is not supported."""
    adds_bos = adds_eos = False
    match file.value("tokenizer.ggml.model", str):
        case "gpt2":
            words = _words(file)
            backend, adds_bos = _byte_level_bpe(file, vocab, words), words.adds_bos
        case "llama":
            backend, adds_bos = sentencepiece_bpe(file, vocab), True
        case "t5":
            backend, adds_eos = sentencepiece_unigram(file, vocab), True
        case other:
            raise TokenizerError(
                f"{file.path}: tokenizer.ggml.model = {other!r} is not supported; "
                "supported are 'gpt2', 'llama' and 't5'"
            )
    _add_tokens(backend, file, vocab)
    _add_bos_and_eos(backend, file, vocab, adds_bos, adds_eos)
    return backend


def _words(file: GGUFFile) -> Words:
    """Files without the name, or with `default`, are of converters that did not know it: then nobody does."""
    name = file.value_or("tokenizer.ggml.pre", "default")
    if name == "default":
        raise TokenizerError(
            f"{file.path} does not say how its tokenizer splits text into words (tokenizer.ggml.pre): "
            "convert the model again with a newer converter"
        )
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.pre = {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(file: GGUFFile, vocab: GGUFVocab, words: Words) -> Tokenizer:
    merges = []
    for line in file.array("tokenizer.ggml.merges", str):
        left, space, right = line.partition(" ")
        if not space:
            raise TokenizerError(f"{file.path}: {line!r} in tokenizer.ggml.merges is not a pair")
        merges.append((left, right))
    try:
        backend = Tokenizer(models.BPE(vocab=vocab.ids(), merges=merges, ignore_merges=words.ignore_merges))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{file.path}: vocabulary and merges do not fit together: {error}") from error
    if words.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = words.split
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_tokens(backend: Tokenizer, file: GGUFFile, vocab: GGUFVocab) -> None:
    """Makes the tokens known that are found in text as they are."""
    is_phi3 = file.value_or("general.architecture", "") == "phi3" and file.value("tokenizer.ggml.model", str) == "llama"
    special = [
        AddedToken(token, normalized=False, special=True, rstrip=is_phi3 and token not in PHI3_NOT_STRIPPING)
        for token in vocab.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)
    ]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(token, normalized=False) for token in vocab.of_kind(TokenKind.USER_DEFINED)])


def _add_bos_and_eos(backend: Tokenizer, file: GGUFFile, vocab: GGUFVocab, adds_bos: bool, adds_eos: bool) -> None:
    """What `encode(add_special_tokens=True)` puts around a text; the defaults are for a file that does not say."""
    ids = vocab.special_ids
    pieces, used = ["$A"], []
    for name, adds in (("bos", adds_bos), ("eos", adds_eos)):
        if not file.value_or(f"tokenizer.ggml.add_{name}_token", adds and name in ids):
            continue
        if name not in ids:
            raise TokenizerError(f"{file.path}: tokenizer.ggml.add_{name}_token is set, but {name}_token_id is missing")
        pieces.insert(0 if name == "bos" else len(pieces), name)
        used.append({"id": name, "ids": [ids[name]], "tokens": [vocab.tokens[ids[name]]]})
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=used)
