"""Templates render as transformers renders them; what goes wrong in one is an error of that request."""

from __future__ import annotations

import itertools
import re
import tracemalloc
from datetime import datetime
from typing import Any

import jinja2
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


QWEN = """
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set state = namespace(last_question=messages|length - 1) %}
{%- for message in messages[::-1] if message.role == 'user' and not state.found %}
    {%- set state.last_question = messages|length - loop.index %}{%- set state.found = true %}
{%- endfor %}
{%- for message in messages if message.role != 'system' %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
        {%- set thought = message.reasoning_content %}
    {%- elif '</think>' in text %}
        {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if thought and loop.last %}{{- '<think>\\n' ~ thought.strip() ~ '\\n</think>\\n\\n' }}{%- endif %}
    {{- text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{% set rest = messages %}{% if messages[0].role == "system" %}{% set system = messages[0]["content"] %}
{%- set rest = messages[1:] %}{% endif %}{{ bos_token }}
{%- for message in rest %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- else %}{{- " " + message["content"] | trim + eos_token }}{%- endif %}
{%- endfor %}"""
PHI = """{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant'] %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [
    {"role": "user", "content": " Hi 1 < 2 & 'x' \n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok "},
    {"role": "user", "content": "文字 🦙"},
]
CONVERSATIONS = [TURNS, TURNS[:1], TURNS[:2], [SYSTEM, *TURNS], [SYSTEM, TURNS[0]], TURNS[1:], [*TURNS, TURNS[0]]]
CONVERSATIONS += [[TURNS[0], {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": None}]]


@pytest.mark.parametrize("source", [QWEN, GEMMA, MISTRAL, PHI], ids=["qwen", "gemma", "mistral", "phi"])
@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "other": [1]}], ids=str
)
def test_shapes_of_real_templates(source: str, variables: dict[str, Any]) -> None:
    """Texts and refusals are those of transformers."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **TOKENS)
    template = ChatTemplate(source, TOKENS)
    for messages, prompt in itertools.product(CONVERSATIONS, (True, False)):
        try:
            expected = reference.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **variables
            )
        except jinja2.TemplateError as error:
            with pytest.raises(ChatTemplateError, match=str(error)):
                template.render(messages, prompt, variables)
        else:
            assert template.render(messages, prompt, variables) == expected


def test_the_thinking_switch() -> None:
    template = ChatTemplate(QWEN, {})
    assert template.render(TURNS, True, {"enable_thinking": False}).endswith("assistant\n<think>\n\n</think>\n\n")
    assert template.render(TURNS, True).endswith("assistant\n")


@pytest.mark.parametrize(
    "name", ["messages", "add_generation_prompt", "tools", "documents", "bos_token", "raise_exception", "range"]
)
def test_variables_cannot_replace_what_has_a_meaning(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"variable cannot be called '{name}'"):
        ChatTemplate("", TOKENS).render(MESSAGES, True, {name: "x"})


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ 'a' * 10**10 }}", "1 \\* 10000000000 elements are more than 100000"),
        ("{{ 10**5 * 'aa' }}", "2 \\* 100000 elements"),
        ("{{ [0] * 10**10 }}", "elements are more than"),
        ("{{ 10**(10**10) }}", "a number of .* bits is more than 4096"),
        (
            "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
            "bits is more",
        ),
        ("{% for i in range(10**9) %}{% endfor %}", "its ranges count more than 100000 numbers"),
        ("{% for i in range(10**4) %}{% for j in range(10**4) %}{% endfor %}{% endfor %}", "its ranges count more"),
        ("{% for i in range(10**5) %}{{ 'a' * 1000 }}{% endfor %}", "the prompt has more than 16000000 characters"),
        ("{{ lipsum(n=10**6) }}", "'lipsum' is undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_costs_are_bounded(source: str, message: str) -> None:
    template = ChatTemplate(source, {})
    tracemalloc.start()
    with pytest.raises(ChatTemplateError, match=message):
        template.render([], True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ ''['__class__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__ }}{{ self._TemplateReference__context }}",
        "{% set x = messages.pop() %}",
        "{{ variable.update(a=1) }}",
    ],
)
def test_there_is_no_way_out_of_the_sandbox(source: str) -> None:
    """Such a name is undefined, which renders as nothing; using it is an error."""
    variable = {"a": 0}
    try:
        outcome = ChatTemplate(source, {}).render([dict(m) for m in MESSAGES], True, {"variable": variable})
    except ChatTemplateError as error:
        outcome = str(error)
    assert not outcome or re.search("unsafe|undefined|no attribute|not safely callable", outcome)
    assert variable == {"a": 0}


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
            "does not take these messages: 'dict object' has no attribute 'content'",
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


def test_what_python_cannot_compile() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})


def test_no_template() -> None:
    with pytest.raises(ChatTemplateError, match=r"this model has no chat template.*use /v1/completions"):
        NoChatTemplate().render(MESSAGES, add_generation_prompt=True)
