"""config.json files that are refused: by key, value and the way out, before anything is allocated by their numbers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from surefoot.checkpoint.errors import CheckpointError, ModelSpecError
from surefoot.checkpoint.gguf import GGUFFile
from surefoot.config.engine_plan import CheckpointRef
from surefoot.config.gguf_readers import ARCHITECTURES as GGUF_ARCHITECTURES
from surefoot.config.gguf_readers import GEMMA_27B_LAYERS
from surefoot.config.hf_readers import ARCHITECTURES
from surefoot.config.model_readers import read_model_spec
from surefoot.config.model_spec import ModelSpec
from tests.config.test_gguf_readers import METADATA, TENSORS, read_gguf
from tests.config.test_model_readers import (
    CONFIG,
    LLAMA3,
    LONGROPE,
    gemma2,
    mistral,
    of_family,
    phi3,
    qwen2,
    read_config,
    without,
)

GEMMA3 = of_family("Gemma3ForCausalLM", "gemma3_text", head_dim=8, rope_theta=1e6)
ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (CONFIG | {"architectures": ["GPT2LMHeadModel"]}, r"architectures = \['GPT2LMHeadModel'\] is not supported"),
    (CONFIG | {"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM' is not supported"),
    (without("architectures", model_type="gemma"), "model_type = 'gemma' is not supported; supported is 'gemma3_text'"),
    (CONFIG | {"model_type": "mistral"}, "model_type = 'mistral' is not supported; supported is 'llama'"),
    (CONFIG | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported is 'silu' or 'gelu_py"),
    (CONFIG | {"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'}"),
    (CONFIG | {"rope_scaling": {"rope_type": "mrope"}}, "rope_type = 'mrope' .* 'yarn' and 'longrope'"),
    (CONFIG | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    (mistral(layer_types=ALTERNATING), r"layer_types = \['full_attention'.* is not supported"),
    (gemma2(use_bidirectional_attention=True), "use_bidirectional_attention = True is not supported"),
    (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    (GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, "should hold 'full_attention' and 'sliding_attention'"),
    (qwen2(layer_types=["chunked_attention"] * 3), "layer_types names 'chunked_attention', which is not supported"),
]

INCOMPLETE: list[tuple[dict[str, Any], str]] = [
    (without("hidden_size"), "config.json lacks 'hidden_size'"),
    (CONFIG | {"num_hidden_layers": "3"}, "num_hidden_layers should be one int, it is '3'"),
    (CONFIG | {"vocab_size": True}, "vocab_size should be one int, it is True"),
    (CONFIG | {"rope_scaling": {"type": "linear"}}, "config.json, rope_scaling lacks 'factor'"),
    (CONFIG | {"rope_scaling": "linear"}, "rope_scaling = 'linear' should be an object or null"),
    (phi3(rope_scaling={"type": "longrope", "short_factor": [1.0] * 4}), "rope_scaling lacks 'long_factor'"),
    (phi3(rope_scaling=LONGROPE | {"long_factor": 2.0}), "long_factor should be a list of float, it is 2.0"),
    (phi3(rope_scaling=LONGROPE | {"long_factor": [1.0] * 3 + ["2"]}), r"long_factor\[3\] should be one float"),
    (phi3(rope_scaling=LONGROPE | {"long_factor": [1.0] * 5}), "5 long rope factors for 4 rotary frequencies"),
    (qwen2(use_sliding_window=True, layer_types=ALTERNATING[:2]), "layer_types has 2 entries for 3 layers"),
    (qwen2(layer_types=ALTERNATING), "names 'sliding_attention', and use_sliding_window is false"),
    (gemma2(sliding_window=None), "sliding_window = 0 should be positive"),
    (GEMMA3 | {"text_config": []}, "text_config = .* should be an object or null"),
]

ABSURD: list[tuple[dict[str, Any], str]] = [
    (CONFIG | {"num_hidden_layers": 0}, "the number of layers is 0, it should be 1 to"),
    (CONFIG | {"num_hidden_layers": 10**6}, "the number of layers is 1000000, it should be 1 to 4096"),
    (CONFIG | {"num_hidden_layers": -1}, "the number of layers is -1"),
    (CONFIG | {"num_attention_heads": 0}, "not a multiple of its 0 attention heads"),
    (CONFIG | {"num_attention_heads": -6}, "not a multiple of its -6 attention heads"),
    (CONFIG | {"num_key_value_heads": 4}, "6 attention heads cannot share 4 key-value heads"),
    (CONFIG | {"num_key_value_heads": 0}, "number of key-value heads is 0, it should be positive"),
    (CONFIG | {"hidden_size": 50}, "hidden size 50 is not a multiple of its 6 attention heads"),
    (
        CONFIG | {"hidden_size": 10**9, "head_dim": 8},
        "the hidden size is 1000000000, it should be",
    ),
    (CONFIG | {"hidden_size": 6 * 10**8}, "the hidden size is 600000000"),
    (CONFIG | {"intermediate_size": 10**12}, "the MLP size is 1000000000000"),
    (CONFIG | {"vocab_size": 10**9}, "the vocabulary is 1000000000"),
    (CONFIG | {"vocab_size": -1}, "the vocabulary is -1"),
    (CONFIG | {"max_position_embeddings": 0}, "the context is 0"),
    (CONFIG | {"max_position_embeddings": 10**12}, "the context is 1000000000000"),
    (CONFIG | {"head_dim": 7}, "7 elements of a head of 7 would have rotary positions; it should be an even number"),
    (CONFIG | {"head_dim": -8}, "the head size is -8"),
    (CONFIG | {"rms_norm_eps": 0.0}, "the norm epsilon is 0.0"),
    (CONFIG | {"rms_norm_eps": float("nan")}, "the norm epsilon is nan"),
    (CONFIG | {"rope_theta": float("inf")}, "the rope theta is inf"),
    (CONFIG | {"rope_theta": float("nan")}, "the rope theta is nan"),
    (CONFIG | {"rope_theta": 0}, "the rope theta is 0.0"),
    (CONFIG | {"rope_theta": 10**400}, r"rope_theta = 10000.*\.\.\. does not fit 64 bits"),
    (CONFIG | {"rope_scaling": {"type": "linear", "factor": 0}}, "a number that is not positive.*LinearRopeScaling"),
    (CONFIG | {"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "not finite: YarnRopeScaling"),
    (CONFIG | {"rope_scaling": {"type": "yarn", "factor": 1e300}}, "not finite: YarnRopeScaling"),
    (
        CONFIG | {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings = 0 should be positive",
    ),
    (
        CONFIG | {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        "not positive.*Llama3RopeScaling",
    ),
    (phi3(rope_scaling=LONGROPE | {"long_factor": [1.0, 1.0, 1.0, -2.0]}), "not positive.*LongRopeScaling"),
    (phi3(partial_rotary_factor=1.5), "partial_rotary_factor = 1.5 should be above 0 and at most 1"),
    (phi3(partial_rotary_factor=0.01), "0 elements of a head of 8 would have rotary positions"),
    (phi3(partial_rotary_factor=0.4), "3 elements of a head of 8 would have rotary positions"),
    (mistral(sliding_window=-5), "sliding_window = -5 should be positive"),
    (mistral(sliding_window=0), "sliding_window = 0 should be positive"),
    (gemma2(query_pre_attn_scalar=0), "query_pre_attn_scalar = 0.0 should be positive"),
    (gemma2(attn_logit_softcapping=0), "attn_logit_softcapping = 0.0 should be positive, or null for none"),
    (gemma2(final_logit_softcapping=float("inf")), "the soft cap of logits is inf"),
    (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern = 0 should be positive"),
]


@pytest.mark.parametrize("config, message", UNSUPPORTED + INCOMPLETE + ABSURD)
def test_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelSpecError, match=message) as caught:
        read_config(tmp_path, config)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not valid JSON"),
        ("[]", "holds list, not a JSON object"),
        ("null", "holds NoneType, not a JSON object"),
        ("\xff", "is not valid JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": ' * 100_000, "is nested too deeply"),
        (json.dumps(CONFIG).replace("500000.0", "1e400"), "the rope theta is inf"),
        (json.dumps(CONFIG).replace("500000.0", "9" * 5000), "is not valid JSON"),
    ],
    ids=["cut", "list", "null", "latin-1", "deep-lists", "deep-objects", "infinite", "long-number"],
)
def test_damaged(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelSpecError, match=message):
        read_model_spec(CheckpointRef(str(tmp_path), "safetensors"))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelSpecError, match=r"config\.json cannot be read: No such file"):
        read_model_spec(CheckpointRef(str(tmp_path), "safetensors"))


NASTY: list[Any] = [
    *(None, True, -1, 0, 1, 7, 10**9, 10**400, -(10**400), 0.5, 1e308, math.inf, -math.inf, math.nan),
    *("", "x", [], [None], [0] * 3, [math.inf] * 4, {}, {"rope_type": "yarn"}, {"rope_type": []}),
]
NASTY_GGUF = [value for value in NASTY if not isinstance(value, int) or abs(value) < 1 << 63]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_value_of_any_key_is_read_or_refused(tmp_path: Path, architecture: str) -> None:
    """No other exception, whatever a config.json says."""
    config = getattr(transformers, architecture).config_class()
    config.architectures = [architecture]
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    whole = json.loads((tmp_path / "config.json").read_text())
    whole.pop("vision_config", None)
    outcomes = set()
    for path in (*key_paths(whole), ("rope_scaling",), ("rope_scaling", "factor"), ("text_config", "rope_theta")):
        for value in NASTY:
            changed = copy.deepcopy(whole)
            place = changed
            for key in path[:-1]:
                place = place.setdefault(key, {"rope_type": "yarn"})
            place[path[-1]] = value
            try:
                outcomes.add(type(read_config(tmp_path, changed)))
            except ModelSpecError as error:
                outcomes.add(type(error))
    assert outcomes == {ModelSpec, ModelSpecError}


def key_paths(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in key_paths(value))


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_any_metadata_value_is_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    extra = {"attention.sliding_window": 64, "attention.key_length": 8, "rope.scaling.type": "yarn"}
    more = {"rope.scaling.factor": 4.0, "block_count": GEMMA_27B_LAYERS.get(architecture, 3)}
    read_gguf(tmp_path, METADATA | more, TENSORS, architecture)
    file = GGUFFile.open(tmp_path / "model.gguf")
    monkeypatch.setattr(GGUFFile, "open", lambda path: file)
    original = file.metadata
    outcomes = set()
    for name in (*METADATA, *more, *extra, "rope.scaling.original_context_length", "attention.sliding_window_pattern"):
        for value in NASTY_GGUF:
            file.metadata = {**original, **{f"{architecture}.{key}": its for key, its in extra.items()}}
            file.metadata[f"{architecture}.{name}"] = value
            try:
                outcomes.add(type(read_model_spec(CheckpointRef(str(file.path), "gguf"))))
            except CheckpointError:
                outcomes.add(CheckpointError)
    assert CheckpointError in outcomes
