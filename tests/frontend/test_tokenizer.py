"""Ids and texts of Hugging Face directories, and of the default model, equal those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from surefoot.checkpoint.errors import TokenizerError
from surefoot.checkpoint.gguf import GGUFFile
from surefoot.config.engine_plan import CheckpointRef
from surefoot.frontend.chat_template import ChatTemplateError
from surefoot.frontend.gguf_tokenizer import read_backend
from surefoot.frontend.gguf_vocab import GGUFVocab
from surefoot.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.tokenizer_cases import CORPUS, MESSAGES, TEMPLATE, TEXTS, load_directory, train_byte_level


def save_directory(directory: Path, backend: tokenizers.Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<|end|>", **options)
    reference.save_pretrained(directory)
    return reference


def test_directory_equals_transformers(tmp_path: Path) -> None:
    backend = train_byte_level("llama-bpe")
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    save_directory(tmp_path, backend)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    found = load_directory(tmp_path)
    assert found.vocab_size == len(reference)
    for text in [*TEXTS, "a <tool> b<tool>"]:
        for special in (False, True):
            ids = reference.encode(text, add_special_tokens=special)
            assert found.encode(text, add_special_tokens=special) == ids, text
            for cut in range(len(ids) + 1):  # most cuts of 🦙 and 文 are not UTF-8
                expected = reference.decode(ids[:cut], skip_special_tokens=special, clean_up_tokenization_spaces=False)
                assert found.decode(ids[:cut], skip_special_tokens=special) == expected
    assert "\ufffd" in found.decode(found.encode("🦙", add_special_tokens=False)[:1])


def test_special_tokens_in_text_become_one_id(tmp_path: Path) -> None:
    save_directory(tmp_path, train_byte_level())
    found = load_directory(tmp_path)
    assert found.encode("<|end|>", add_special_tokens=True) == [0, 1]
    assert found.encode("<|end|><bos>", add_special_tokens=False) == [1, 0]
    assert found.decode([0, 1]) == ""
    assert found.decode([0, 1], skip_special_tokens=False) == "<bos><|end|>"


def test_settings_of_a_training_run_are_dropped(tmp_path: Path) -> None:
    backend = train_byte_level()
    save_directory(tmp_path, backend)
    expected = load_directory(tmp_path).encode(CORPUS[2], add_special_tokens=True)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_directory(tmp_path).encode(CORPUS[2], add_special_tokens=True) == expected
    assert len(expected) > 4


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        ({}, {}, (1,)),  # eos_token of tokenizer_config.json
        ({"eos_token_id": 5}, {}, (1, 5)),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (1, 5, 6, 7)),
        ({"eos_token_id": None}, {"eos_token_id": [9, 1]}, (1, 9)),
    ],
)
def test_eos_ids(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...]) -> None:
    save_directory(tmp_path, train_byte_level())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_directory(tmp_path).eos_ids == expected


def test_a_base_model_has_no_chat_template(tmp_path: Path) -> None:
    save_directory(tmp_path, train_byte_level())
    found = load_directory(tmp_path)
    with pytest.raises(ChatTemplateError, match="use /v1/completions"):
        found.apply_chat_template([{"role": "user", "content": "hi"}])


def test_chat_template_in_its_own_file(tmp_path: Path) -> None:
    reference = save_directory(tmp_path, train_byte_level(), chat_template=TEMPLATE)
    assert (tmp_path / "chat_template.jinja").is_file()
    expected = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert load_directory(tmp_path).apply_chat_template(MESSAGES) == expected == "<bos>[user]hi<|end|>"


@pytest.mark.parametrize(
    "template", [TEMPLATE, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]]
)
def test_chat_template_in_the_config(tmp_path: Path, template: Any) -> None:
    save_directory(tmp_path, train_byte_level())
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text()) | {"chat_template": template, "bos_token": {"content": "<bos>"}}
    config_path.write_text(json.dumps(config))
    found = load_directory(tmp_path)
    assert found.apply_chat_template(MESSAGES) == "<bos>[user]hi<|end|>"


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("tokenizer.json", "{}", r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "holds list, not a JSON object"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', r"\(rag\) is the default"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template = 7 is not a text"),
        ("tokenizer_config.json", '{"chat_template": {"default": ""}}', "is not a text"),
        ("tokenizer_config.json", '{"chat_template": ["x", {"template": ""}]}', r"\(None\) is the default"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default", "template": 7}]}',
            "chat_template = 7 is not",
        ),
        ("tokenizer_config.json", '{"chat_template": [{"name": [], "template": 7}]}', "is the default"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', r"chat template is not valid \(line 1\)"),
        ("config.json", '{"eos_token_id": "2"}', "eos_token_id = '2' should be an integer or a list"),
    ],
)
def test_damaged_directories(tmp_path: Path, file: str, content: str, message: str) -> None:
    save_directory(tmp_path, train_byte_level())
    (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_directory(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_chat_template_that_is_not_text(tmp_path: Path) -> None:
    save_directory(tmp_path, train_byte_level())
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not UTF-8"):
        load_directory(tmp_path)


def test_variables_of_a_chat_template(tmp_path: Path) -> None:
    save_directory(tmp_path, train_byte_level(), chat_template="{{ mood }}")
    assert load_directory(tmp_path).apply_chat_template(MESSAGES, variables={"mood": "calm"}) == "calm"
    assert load_directory(tmp_path).apply_chat_template(MESSAGES) == ""


def test_the_bytes_of_tokens(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.add_tokens([AddedToken("<é tool>", normalized=False)])
    save_directory(tmp_path, backend)
    found = load_directory(tmp_path)
    for text in [*TEXTS, "a<é tool>b"]:
        ids = found.encode(text, add_special_tokens=False)
        assert b"".join(map(found.token_bytes, ids)).decode() == text
    halves = found.encode("\U00100000", add_special_tokens=False)
    assert [found.token_bytes(id_) for id_ in halves] == [b"\xf4", b"\x80", b"\x80", b"\x80"]
    assert found.token_text(halves[0]) == "\ufffd"
    assert (found.token_text(1), found.token_bytes(1)) == ("<|end|>", b"<|end|>")
    assert (found.token_text(99_999), found.token_bytes(99_999)) == ("", b"")


def test_the_bytes_of_tokens_without_a_decoder(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b▁": 1}))
    save_directory(tmp_path, backend)
    assert [load_directory(tmp_path).token_text(id_) for id_ in (0, 1)] == ["a", "b▁"]


def test_a_directory_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json\. Make one with transformers"):
        load_directory(tmp_path)


# ---- The default model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(CheckpointRef(str(default_model_path), "gguf"))


def test_ids_of_the_default_model(default_tokenizer: Tokenizer) -> None:
    """The ids are llama-server's."""
    ids = [81, 1116, 33, 34, 278, 256, 33, 34, 1792, 333, 35]
    assert default_tokenizer.encode("a\n\n12 b  12 x   3", add_special_tokens=True) == ids
    assert default_tokenizer.vocab_size == 49_152
    assert default_tokenizer.eos_ids == (0, 2)
    assert default_tokenizer.encode("<|im_start|>user<|im_end|>", add_special_tokens=False)[::2] == [1, 2]
    for text in TEXTS:
        found = default_tokenizer.encode(text, add_special_tokens=False)
        assert default_tokenizer.decode(found, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hi <|im_end|>\n"}],
        [
            {"role": "user", "content": "1 < 2 & 'x'?"},
            {"role": "assistant", "content": "{{ yes }}"},
            {"role": "user", "content": "文字 🦙"},
        ],
    ],
)
def test_chat_of_the_default_model(
    default_tokenizer: Tokenizer, default_model_path: Path, messages: list[dict[str, str]]
) -> None:
    file = GGUFFile.open(default_model_path)
    template = file.value("tokenizer.chat_template", str)
    reference = PreTrainedTokenizerFast(tokenizer_object=read_backend(file, GGUFVocab(file)), chat_template=template)
    for prompt in (True, False):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert default_tokenizer.apply_chat_template(messages, add_generation_prompt=prompt) == expected
    assert default_tokenizer.encode(expected, add_special_tokens=False) == reference.encode(expected)


def test_the_default_tokenizer_is_light(default_model_path: Path) -> None:
    """In a fresh process: no torch, no transformers."""
    code = (
        "import sys; from surefoot.frontend.tokenizer import load_tokenizer;"
        "from surefoot.config.engine_plan import CheckpointRef;"
        f"load_tokenizer(CheckpointRef({str(default_model_path)!r}, 'gguf'));"
        "print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_text_that_is_not_unicode_is_refused(default_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogates"):
        default_tokenizer.encode("caf\udce9", add_special_tokens=False)


def test_the_longest_token_bounds_the_length_of_a_text(default_tokenizer: Tokenizer) -> None:
    longest = default_tokenizer.longest_token
    for text in (" " * 5000, "=" * 5000, "a" * 5000, "\u4f60" * 500, "-" * 777):
        ids = default_tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) >= len(text) // longest
