"""Text to token ids and back, and messages to a prompt, for one checkpoint.

`load_tokenizer` reads a Hugging Face directory here, and a GGUF file in `gguf_tokenizer`. Both give a `Tokenizer` over
the `tokenizers` library, so both treat text as Hugging Face's fast tokenizers do: the text of a special token, such as
"<|im_start|>", becomes that one token wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from surefoot.checkpoint.errors import TokenizerError
from surefoot.checkpoint.gguf import GGUFFile
from surefoot.config.engine_plan import CheckpointRef
from surefoot.frontend.chat_template import ChatTemplate, ChatTemplateError, Message, NoChatTemplate
from surefoot.frontend.gguf_tokenizer import read_backend
from surefoot.frontend.gguf_vocab import GGUFVocab
from surefoot.frontend.token_bytes import TokenBytes


class Tokenizer:
    """Safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, eos_ids: Iterable[int], template: ChatTemplate | NoChatTemplate
    ) -> None:
        self._backend = backend
        self._template = template
        self._token_bytes = TokenBytes(backend)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eos_ids = tuple(sorted(set(eos_ids)))  # any of them ends a text
        self.longest_token = max(map(len, vocab), default=1)  # characters

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        `add_special_tokens` adds what the model expects around a text, usually a begin-of-text token. Say False for
        the result of `apply_chat_template`, which has written its own. Raises ValueError for text that is not Unicode:
        lone surrogates, as Python reads undecodable bytes.
        """
        try:
            # Of its methods, only the one for batches lets other threads run meanwhile.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise ValueError("the text has lone surrogates: it was not valid UTF-8") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary become nothing."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, often a part of a character; a special token's is its own text.

        Empty for an id beyond the vocabulary, which a model may have. The bytes of the tokens of a text add up to it,
        but for the space that SentencePiece puts before a text.
        """
        return self._token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is not a whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text for a conversation.

        `variables` are the names besides the messages that a template may read, such as Qwen 3's `enable_thinking`;
        others are without effect. Raises ChatTemplateError if there is no template, or if it refuses.
        """
        return self._template.render(messages, add_generation_prompt, variables)


def load_tokenizer(ref: CheckpointRef) -> Tokenizer:
    """Raises TokenizerError, or CheckpointError if the file is damaged."""
    return _load_gguf(GGUFFile.open(ref.path)) if ref.format == "gguf" else _load_directory(Path(ref.path))


def _load_gguf(file: GGUFFile) -> Tokenizer:
    vocab = GGUFVocab(file)
    template = _template(file.path, file.metadata.get("tokenizer.chat_template"), vocab.special_tokens())
    return Tokenizer(read_backend(file, vocab), vocab.end_of_text_ids(), template)


def _template(path: Path, source: object, tokens: dict[str, str]) -> ChatTemplate | NoChatTemplate:
    """`source` is None or empty if there is none."""
    if not isinstance(source, str | None):
        raise TokenizerError(f"{path}: chat_template = {source!r} is not a text")
    try:
        return ChatTemplate(source, tokens) if source else NoChatTemplate()
    except ChatTemplateError as error:
        raise TokenizerError(f"{path}: {error}") from error


# ---- Hugging Face directories ----------------------------------------------------------------------------------------


def _load_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{directory} has no tokenizer.json. Make one with transformers: "
            "`AutoTokenizer.from_pretrained(directory).save_pretrained(directory)`"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    # Some files keep the settings of the training run.
    backend.no_truncation()
    backend.no_padding()

    config = _read_json(directory / "tokenizer_config.json")
    tokens = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    eos_ids = _eos_ids(directory)
    eos_id = backend.token_to_id(tokens.get("eos_token", ""))
    if eos_id is not None:
        eos_ids.append(eos_id)
    return Tokenizer(backend, eos_ids, _template(directory, _template_source(directory, config), tokens))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on; each is written as a string, or as an object with its properties."""
    found = {}
    for name, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _eos_ids(directory: Path) -> list[int]:
    """What config.json and generation_config.json call end of text: no, one or several ids each."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        ids = _read_json(directory / name).get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(id_) is int for id_ in listed):
            raise TokenizerError(f"{directory / name}: eos_token_id = {ids!r} should be an integer or a list of them")
        found += listed
    return found


def _template_source(directory: Path, config: dict[str, Any]) -> object:
    """The default chat template, None if there is none. A file of its own wins over tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path} is not UTF-8: {error}") from error
    source = config.get("chat_template")
    if not isinstance(source, list):
        return source
    named = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
    if "default" not in named:
        config_path = directory / "tokenizer_config.json"
        raise TokenizerError(f"{config_path}: none of the chat templates ({', '.join(named)}) is the default")
    return named["default"]


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        parsed = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise TokenizerError(f"{path} holds {type(parsed).__name__}, not a JSON object")
    return parsed
