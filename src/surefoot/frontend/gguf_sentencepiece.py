"""SentencePiece tokenizers of GGUF files: BPE and unigram, both with a score for every token.

    text -> normalised by the model's own table of characters, if it has one; runs of spaces to one, if it says so
         -> a space before it, if it says so -> every space a "▁" -> tokens

As in Hugging Face's legacy mode and in llama.cpp, "text" is each stretch between two special tokens.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from surefoot.checkpoint.errors import TokenizerError
from surefoot.checkpoint.gguf import GGUFFile
from surefoot.frontend.gguf_vocab import GGUFVocab, TokenKind

CHARSMAP_KEY = "tokenizer.ggml.precompiled_charsmap"


def sentencepiece_bpe(file: GGUFFile, vocab: GGUFVocab) -> Tokenizer:
    unknown = vocab.of_kind(TokenKind.UNKNOWN)
    model = models.BPE(
        vocab=vocab.ids(),
        merges=_merges_from_scores(file, vocab),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=TokenKind.BYTE in vocab.kinds,
    )
    return _with_spaces(Tokenizer(model), file, adds_prefix=True)


def sentencepiece_unigram(file: GGUFFile, vocab: GGUFVocab) -> Tokenizer:
    scores = _scores(file, vocab)
    normal = [score for score, kind in zip(scores, vocab.kinds, strict=True) if kind == TokenKind.NORMAL]
    if "unknown" not in vocab.special_ids or not normal:
        raise TokenizerError(f"{file.path}: a unigram vocabulary needs normal tokens and an unknown_token_id")
    # The library derives the cost of an unknown character from the worst score: padding must not count.
    worst = min(normal)
    pieces = [(token, max(score, worst)) for token, score in zip(vocab.tokens, scores, strict=True)]
    while vocab.kinds[len(pieces) - 1] == TokenKind.UNUSED:
        pieces.pop()
    model = models.Unigram(pieces, vocab.special_ids["unknown"], byte_fallback=TokenKind.BYTE in vocab.kinds)
    return _with_spaces(Tokenizer(model), file, adds_prefix=False)


def _with_spaces(backend: Tokenizer, file: GGUFFile, adds_prefix: bool) -> Tokenizer:
    """`adds_prefix`: what tokenizer.ggml.add_space_prefix is if the file does not say."""
    adds_prefix = file.value_or("tokenizer.ggml.add_space_prefix", adds_prefix)
    before = [_charsmap(file)] if CHARSMAP_KEY in file.metadata else []
    if file.value_or("tokenizer.ggml.remove_extra_whitespaces", False):
        # Only spaces count: other white space is text to SentencePiece.
        before += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if adds_prefix:
        before.append(normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    to_space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*to_space, decoders.Strip(" ", 1, 0)] if adds_prefix else to_space)
    return backend


def _charsmap(file: GGUFFile) -> normalizers.Normalizer:
    values = file.array(CHARSMAP_KEY, int)
    try:
        return normalizers.Precompiled(bytes(value & 255 for value in values))  # written as signed bytes, too
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{file.path}: {CHARSMAP_KEY} cannot be read: {error}") from error


def _merges_from_scores(file: GGUFFile, vocab: GGUFVocab) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union has the best score; a list of merges says the same.

    Every way to cut a token into two tokens is a merge, ranked by the score of the whole.
    """
    scores = _scores(file, vocab)
    ids = {token: id_ for id_, token in enumerate(vocab.tokens) if vocab.kinds[id_] == TokenKind.NORMAL}
    merges = []
    for token in sorted(ids, key=lambda token: scores[ids[token]], reverse=True):
        # The hot loop: Gemma has 256,000 tokens.
        cuts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids]
        if len(cuts) > 1:
            cuts.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += cuts
    return merges


def _scores(file: GGUFFile, vocab: GGUFVocab) -> list[float]:
    scores = file.array("tokenizer.ggml.scores", float)
    vocab.check_length("scores", len(scores))
    return scores
