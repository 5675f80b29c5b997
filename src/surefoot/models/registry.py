"""How each family names its weights: in safetensors files as transformers saves them, in GGUF files as llama.cpp's
converter writes them."""

from __future__ import annotations

from dataclasses import replace

from surefoot.checkpoint.locate import CheckpointFormat
from surefoot.config.model_spec import ModelSpec
from surefoot.models.weights import Naming, WeightRules, decoder_rules

_SAFETENSORS = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attention_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "attention_out": "model.layers.{i}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
}
_FUSED_SAFETENSORS = {
    "qkv": "model.layers.{i}.self_attn.qkv_proj.weight",
    "gate_up": "model.layers.{i}.mlp.gate_up_proj.weight",
}
_GEMMA_SAFETENSORS = {
    "post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_GGUF = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attention_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "attention_out": "blk.{i}.attn_output.weight",
    "post_attention_norm": "blk.{i}.post_attention_norm.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
}
_FUSED_GGUF = {"qkv": "blk.{i}.attn_qkv.weight", "gate_up": "blk.{i}.ffn_up.weight"}

# Old files store per layer what config.json implies.
_IGNORED_SAFETENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
_IGNORED_GGUF = (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight")  # read into ModelSpec

# Of a Gemma 3 that also sees, the text model is served. Its names have changed between versions of transformers.
_GEMMA3_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_GEMMA3_IGNORED = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)

_Formats = dict[CheckpointFormat, Naming]

_PLAIN: _Formats = {
    "safetensors": Naming(_SAFETENSORS, ignored=_IGNORED_SAFETENSORS),
    "gguf": Naming(_GGUF, ignored=_IGNORED_GGUF),
}
# llama.cpp's file of a Mistral is that of a Llama.
_LLAMA: _Formats = _PLAIN | {"gguf": Naming(_GGUF, interleaved=True, ignored=_IGNORED_GGUF)}
# Gemma's norms multiply by 1 + what safetensors files store; GGUF files store the sum.
_GEMMA2 = Naming(_SAFETENSORS | _GEMMA_SAFETENSORS, norm_offset=1.0, ignored=_IGNORED_SAFETENSORS)
_GEMMA3 = replace(_GEMMA2, ignored=_IGNORED_SAFETENSORS + _GEMMA3_IGNORED, renamed=_GEMMA3_PREFIXES)

NAMINGS: dict[str, _Formats] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "phi3": {
        "safetensors": Naming(_SAFETENSORS | _FUSED_SAFETENSORS, ignored=_IGNORED_SAFETENSORS),
        "gguf": Naming(_GGUF | _FUSED_GGUF, ignored=_IGNORED_GGUF),
    },
    "gemma2": _PLAIN | {"safetensors": _GEMMA2},
    "gemma3": _PLAIN | {"safetensors": _GEMMA3},
}


def weight_rules(spec: ModelSpec, format: CheckpointFormat) -> WeightRules:
    """ValueError for a family that has none."""
    if spec.family not in NAMINGS:
        raise ValueError(f"no weight rules for the family {spec.family!r}")
    return decoder_rules(spec, NAMINGS[spec.family][format])
