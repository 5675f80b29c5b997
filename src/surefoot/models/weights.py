"""How a checkpoint's tensors become a model's parameters: explicit rules, one per parameter.

A model names its parameters (`layers.3.qkv`); a rule says from which tensors of the file a parameter is made. A tensor
that no rule uses, or that a rule misses, is an error before anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from surefoot.config.model_spec import ModelSpec


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # > 0: rows of so many heads are stored for interleaved rotary pairs (GGUF's q and k)


@dataclass(frozen=True)
class WeightRule:
    parameter: str
    sources: tuple[Source, ...]  # stacked along the first dimension


@dataclass(frozen=True)
class WeightRules:
    rules: tuple[WeightRule, ...]
    ignored: tuple[str, ...]  # tensors that a file may hold and that no parameter needs


class WeightSource(Protocol):
    def take(self, parameter: str) -> Tensor:
        """The parameter in fp32, as its rule says. Each is taken once."""


class WeightNamesError(ValueError):
    """The checkpoint's tensors are not those of the model: lists all that are missing, unused or misshapen."""


def check_names(rules: WeightRules, found: dict[str, tuple[int, ...]]) -> None:
    """Raises WeightNamesError unless the rules and `found` (name to shape) agree."""
    wanted = {source.name: source.shape for rule in rules.rules for source in rule.sources}
    problems = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    problems += [
        f"unused: {name} {list(found[name])}" for name in found if name not in wanted and name not in rules.ignored
    ]
    problems += [
        f"wrong shape: {name} is {list(found[name])}, the config says {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise WeightNamesError(f"{len(problems)} tensors do not fit the model:\n  " + "\n  ".join(problems))


def llama_rules(spec: ModelSpec, names: dict[str, str], interleaved: bool) -> WeightRules:
    """Rules of the Llama family. `names`: the file's name for each of our short names, `{i}` for the layer."""

    def source(short: str, shape: tuple[int, ...], layer: int = 0, heads: int = 0) -> Source:
        return Source(names[short].format(i=layer), shape, heads if interleaved else 0)

    vocab, hidden, size = spec.vocab_size, spec.hidden_size, spec.intermediate_size
    rules = [
        WeightRule("embedding", (source("embedding", (vocab, hidden)),)),
        WeightRule("norm", (source("norm", (hidden,)),)),
    ]
    if not spec.tied_embeddings:
        rules.append(WeightRule("lm_head", (source("lm_head", (vocab, hidden)),)))
    for i in range(spec.num_layers):
        qkv = (
            source("q", (spec.q_size, hidden), i, spec.num_heads),
            source("k", (spec.kv_size, hidden), i, spec.num_kv_heads),
            source("v", (spec.kv_size, hidden), i),
        )
        gate_up = (source("gate", (size, hidden), i), source("up", (size, hidden), i))
        rules += [
            WeightRule(f"layers.{i}.attention_norm", (source("attention_norm", (hidden,), i),)),
            WeightRule(f"layers.{i}.qkv", qkv),
            WeightRule(f"layers.{i}.attention_out", (source("attention_out", (hidden, spec.q_size), i),)),
            WeightRule(f"layers.{i}.mlp_norm", (source("mlp_norm", (hidden,), i),)),
            WeightRule(f"layers.{i}.gate_up", gate_up),
            WeightRule(f"layers.{i}.down", (source("down", (hidden, size), i),)),
        ]
    ignored = [names["rope_frequencies"].format(i=i) for i in range(spec.num_layers)]
    ignored += [names["lm_head"]] if spec.tied_embeddings else []
    return WeightRules(tuple(rules), tuple(ignored))


LLAMA_SAFETENSORS = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attention_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "attention_out": "model.layers.{i}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
    "rope_frequencies": "model.layers.{i}.self_attn.rotary_emb.inv_freq",  # old files store what config.json implies
}

LLAMA_GGUF = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attention_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "attention_out": "blk.{i}.attn_output.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "rope_frequencies": "rope_freqs.weight",  # read into ModelSpec.rope_scaling
}
