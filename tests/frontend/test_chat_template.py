"""Templates render as transformers renders them; what goes wrong in one is an error of that request."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from surefoot.frontend.chat_template import ChatTemplate, ChatTemplateError, NoChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "naïve 文字 🦙"},
    {"role": "assistant", "content": "ok", "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": [None, True]}}]},
]
TEMPLATES = {
    "whitespace control": "{% for m in messages %}\n  {% if loop.first %}\n{{ bos_token }}\n  {% endif %}\n"
    "  {{- m['role'] -}} :\n{{ m.content | trim }}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.last %}{% break %}{% endif %},{% endfor %}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "undefined": "{{ eos_token }}[{{ pad_token }}]{{ tools is none }}{{ documents is none }}{{ custom is defined }}",
    "date": "{{ strftime_now('%Y') }}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_equal_to_transformers(source: str, prompt: bool) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **TOKENS)
    expected = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
    assert ChatTemplate(source, TOKENS).render(MESSAGES, add_generation_prompt=prompt) == expected
    assert expected


def test_the_date_is_today() -> None:
    assert ChatTemplate("{{ strftime_now('%d %B %Y') }}", {}).render([], True) == datetime.now().strftime("%d %B %Y")


@pytest.mark.parametrize(
    "source, messages, message",
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            MESSAGES,
            "does not take these messages: roles must alternate",
        ),
        (
            "{{ 'x' + messages[0].content }}",
            [{"role": "user", "content": None}],
            "does not take these messages: can only",
        ),
        ("{{ messages[0].absent.deep }}", MESSAGES, "has no attribute 'absent'"),
        ("{{ messages[7].content }}", MESSAGES, "does not take these messages"),
        ("{{ messages.append(1) }}", MESSAGES, "unsafe"),
        ("{{ messages.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ("{% set ns = namespace(__call__=1) %}", MESSAGES, "a namespace cannot hold '__call__'"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", MESSAGES, "a namespace cannot hold '_x'"),
        ("{% for i in range(10**9) %}{% endfor %}", MESSAGES, "does not take these messages"),
        ("{{ 1 / 0 }}", MESSAGES, "division by zero"),
    ],
)
def test_errors_belong_to_the_request(source: str, messages: list[dict[str, Any]], message: str) -> None:
    before = [dict(m) for m in messages]
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render(messages, add_generation_prompt=True)
    assert messages == before


def test_invalid_jinja_is_found_at_once() -> None:
    with pytest.raises(ChatTemplateError, match=r"not valid \(line 2\)"):
        ChatTemplate("ok\n{% endif %}", {})


def test_no_template() -> None:
    with pytest.raises(ChatTemplateError, match=r"this model has no chat template.*use /v1/completions"):
        NoChatTemplate().render(MESSAGES, add_generation_prompt=True)
