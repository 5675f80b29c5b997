"""Tiny random checkpoints of every family, as transformers saves them and as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.tiny import CHAT_TEMPLATE, TinyModel, write_tokenizer

WINDOW = 20  # more than a page, and no multiple of one

_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
_GEMMA = {"hidden_size": 48, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}

_CLASSES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"hidden_size": 48, "head_dim": 16, "sliding_window": WINDOW},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _QWEN),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**_QWEN, "head_dim": 24}),
    "phi3": (
        transformers.Phi3Config,
        transformers.Phi3ForCausalLM,
        {"sliding_window": WINDOW, "partial_rotary_factor": 0.75},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {**_GEMMA, "num_hidden_layers": 7},
    ),
}
FAMILIES = tuple(_CLASSES)


@dataclass(frozen=True)
class Tiny(TinyModel):
    family: str


def write_tiny(family: str, directory: Path, max_shard_size: str = "5GB", **changes: Any) -> Tiny:
    """`changes` override the config. Weights are large enough for logits that differ clearly between tokens."""
    config_class, model_class, settings = _CLASSES[family]
    vocab_size = write_tokenizer(directory).get_vocab_size()
    config = config_class(**(_SIZES | settings | {"vocab_size": vocab_size} | changes))
    tiny = Tiny(directory, random_model(model_class, config), family)
    tiny.model.save_pretrained(directory, max_shard_size=max_shard_size)
    return tiny


def write_tiny_gemma3_with_vision(directory: Path, **changes: Any) -> Tiny:
    """`changes` override the text model's config."""
    vocab_size = write_tokenizer(directory).get_vocab_size()
    text = _SIZES | _CLASSES["gemma3"][2] | {"vocab_size": vocab_size} | changes
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=300, eos_token_id=2
    )
    tiny = Tiny(directory, random_model(transformers.Gemma3ForConditionalGeneration, config), "gemma3")
    tiny.model.save_pretrained(directory)
    return tiny


def random_model(model_class: Any, config: Any) -> Any:
    """With norms that do not scale by one, and biases that are not zero, as in trained models."""
    torch.manual_seed(1234)
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # Gemma's are stored less one
                parameter.uniform_(0.5, 1.5).sub_(1.0 if "gemma" in config.model_type else 0.0)
            elif name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
    return model


# ---- GGUF ------------------------------------------------------------------------------------------------------------

_GGUF_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


def write_tiny_gguf(tiny: Tiny, path: Path, metadata: dict[str, Any] | None = None) -> Tiny:
    """The same model in a GGUF file. `metadata`: keys without the architecture's name, besides what is written here."""
    config = tiny.model.config
    arch = _GGUF_ARCHITECTURES[tiny.family]
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, name)
    _write_sizes(writer, config)
    _write_family(writer, tiny.family, config)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
    for key, value in (metadata or {}).items():
        add[type(value)](f"{name}.{key}", value)
    _write_tokenizer(writer, tiny.path)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for source, parameter in tiny.model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert found is not None, source
        writer.add_tensor(found, np.ascontiguousarray(_as_stored(tiny.family, source, parameter.numpy(), config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tiny(path, tiny.model, tiny.family)


def _write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))


def _write_family(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    rope = config.rope_parameters
    if family == "gemma3":
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    elif family != "gemma2":  # its converter leaves the default
        writer.add_rope_freq_base(rope["rope_theta"])
    if family in ("mistral", "phi3", "gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if family.startswith("gemma") and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "phi3":
        writer.add_rope_dimension_count(int(_head_dim(config) * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "longrope":
            original = rope["original_max_position_embeddings"]
            ratio = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / np.log(original))))
            for which in ("long", "short"):
                writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], dtype=np.float32))
        case "llama3":
            plain = rope["rope_theta"] ** -(np.arange(0, _head_dim(config), 2) / _head_dim(config))
            factors = plain / _llama3_frequencies(config)
            writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def _llama3_frequencies(config: Any) -> np.ndarray:
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    return compute(config, "cpu")[0].numpy()


def _as_stored(family: str, name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    """Llama's q and k with interleaved rotary pairs, Gemma's norms with the one added."""
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    if family in ("llama", "mistral"):
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                halves = weight.reshape(heads, 2, _head_dim(config) // 2, *weight.shape[1:])
                return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight


def _head_dim(config: Any) -> int:
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads


def _write_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    """The byte-level BPE of the Hugging Face directory."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
