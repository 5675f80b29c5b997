"""The tokens of a GGUF file: their texts, their kinds, and which of them have a role."""

from __future__ import annotations

from enum import IntEnum

from surefoot.checkpoint.errors import TokenizerError
from surefoot.checkpoint.gguf import GGUFFile

# A model may end a turn with one of these though its metadata names another one as end of text.
END_OF_TEXT_TOKENS = {
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",  # Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",
    "<|end|>",  # Phi 3
    "<end_of_turn>",  # Gemma
}


class TokenKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4  # found in text before anything else is done to it, as control tokens are, but rendered
    UNUSED = 5
    BYTE = 6


class GGUFVocab:
    """Raises TokenizerError (CheckpointError for missing keys) if the lists do not fit together."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.tokens = list(file.array("tokenizer.ggml.tokens", str))
        self.kinds = list(file.array("tokenizer.ggml.token_type", int))
        self.check_length("token_type", len(self.kinds))
        self._mend_user_defined(is_sentencepiece=file.value("tokenizer.ggml.model", str) != "gpt2")
        if len(set(self.tokens)) != len(self.tokens):
            last = {token: id_ for id_, token in enumerate(self.tokens)}
            twice = next(token for id_, token in enumerate(self.tokens) if last[token] != id_)
            raise TokenizerError(f"{file.path}: the vocabulary has the token {twice!r} twice")
        self.special_ids = self._special_ids(file)

    def _mend_user_defined(self, is_sentencepiece: bool) -> None:
        """Converters call Gemma's end of a turn user-defined, and differ in whether they write spaces as "▁"."""
        for id_, kind in enumerate(self.kinds):
            if kind != TokenKind.USER_DEFINED:
                continue
            if self.tokens[id_] in END_OF_TEXT_TOKENS:
                self.kinds[id_] = TokenKind.CONTROL
            elif is_sentencepiece:
                self.tokens[id_] = self.tokens[id_].replace("▁", " ")

    def check_length(self, key: str, length: int) -> None:
        if length != len(self.tokens):
            raise TokenizerError(
                f"{self.path} has {len(self.tokens)} tokens but {length} entries in tokenizer.ggml.{key}"
            )

    def ids(self) -> dict[str, int]:
        """Token -> id, without the unused ones, which pad the vocabulary to a round size."""
        kinds = self.kinds
        return {token: id_ for id_, token in enumerate(self.tokens) if kinds[id_] != TokenKind.UNUSED}

    def of_kind(self, *kinds: TokenKind) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def end_of_text_ids(self) -> list[int]:
        named = [id_ for name, id_ in self.special_ids.items() if name in ("eos", "eot", "eom")]
        control = [id_ for id_, kind in enumerate(self.kinds) if kind == TokenKind.CONTROL]
        return named + [id_ for id_ in control if self.tokens[id_] in END_OF_TEXT_TOKENS]

    def special_tokens(self) -> dict[str, str]:
        """The special tokens that a chat template may write: `bos_token` and so on."""
        names = {"padding": "pad", "unknown": "unk"}
        return {f"{names.get(name, name)}_token": self.tokens[id_] for name, id_ in self.special_ids.items()}

    def _special_ids(self, file: GGUFFile) -> dict[str, int]:
        """Name (such as "bos") -> token id, for those that the file names."""
        found = {}
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            key = f"tokenizer.ggml.{name}_token_id"
            if key not in file.metadata:
                continue
            found[name] = file.value(key, int)
            if not 0 <= found[name] < len(self.tokens):
                raise TokenizerError(f"{file.path}: {key} = {found[name]} is not one of the {len(self.tokens)} tokens")
        return found
