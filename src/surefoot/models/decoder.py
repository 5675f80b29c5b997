"""The decoder-only transformer, built from a `ModelSpec`. It holds weights and knows nothing of requests.

All dense families are this one class: what sets them apart are fields of the spec and rules for their weights.
"""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

from surefoot.attention.backend import AttentionBackend
from surefoot.attention.forward_inputs import ForwardInputs, Metadata
from surefoot.attention.kv_cache import KVCache, KVPages
from surefoot.config.model_spec import ModelSpec
from surefoot.kernels.sampling import greedy
from surefoot.layers.attention import Attention
from surefoot.layers.linear import Linear, LinearScheme
from surefoot.layers.mlp import GatedMLP
from surefoot.layers.norm import HeadRMSNorm, RMSNorm
from surefoot.layers.rotary import Rotary
from surefoot.layers.vocab import Embedding, LMHead
from surefoot.models.weights import WeightSource


class DecoderLayer(Generic[Metadata]):
    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        weights: WeightSource,
        scheme: LinearScheme,
        backend: AttentionBackend[Metadata],
    ) -> None:
        prefix = f"layers.{layer}"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.take(f"{prefix}.{name}"), spec.norm_eps)

        def linear(name: str, bias: bool) -> Linear:
            return scheme.linear(
                weights.take(f"{prefix}.{name}"), weights.take(f"{prefix}.{name}_bias") if bias else None
            )

        self._attention_norm = norm("attention_norm")
        self._attention = Attention(
            spec,
            spec.layers[layer],
            linear("qkv", spec.qkv_bias),
            linear("attention_out", spec.attention_out_bias),
            _qk_norm(spec, prefix, weights) if spec.qk_norm else None,
            backend,
        )
        self._mlp_norm = norm("mlp_norm")
        self._mlp = GatedMLP(linear("gate_up", spec.mlp_bias), linear("down", spec.mlp_bias), spec.activation)
        self._post_attention_norm = norm("post_attention_norm") if spec.post_norms else _unchanged
        self._post_mlp_norm = norm("post_mlp_norm") if spec.post_norms else _unchanged

    def __call__(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], inputs: ForwardInputs[Metadata], cache: KVPages
    ) -> Tensor:
        x = x + self._post_attention_norm(self._attention(self._attention_norm(x), rotary, inputs, cache))
        return x + self._post_mlp_norm(self._mlp(self._mlp_norm(x)))


def _qk_norm(spec: ModelSpec, prefix: str, weights: WeightSource) -> HeadRMSNorm:
    q = weights.take(f"{prefix}.q_norm").expand(spec.num_heads, -1)
    k = weights.take(f"{prefix}.k_norm").expand(spec.num_kv_heads, -1)
    return HeadRMSNorm(torch.cat((q, k)), spec.norm_eps)


def _unchanged(x: Tensor) -> Tensor:
    return x


class Decoder(Generic[Metadata]):
    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        scheme: LinearScheme,
        backend: AttentionBackend[Metadata],
        dtype: torch.dtype,
    ) -> None:
        embedding = weights.take("embedding")
        self._embedding = Embedding(embedding, scheme, dtype, spec.embedding_scale)
        lm_head = embedding if spec.tied_embeddings else weights.take("lm_head")
        self._lm_head = LMHead(lm_head, scheme, spec.logits_softcap)
        del embedding, lm_head
        self._layers = [DecoderLayer(spec, i, weights, scheme, backend) for i in range(spec.num_layers)]
        self._norm = RMSNorm(weights.take("norm"), spec.norm_eps)
        ropes = list(dict.fromkeys(kind.rope for kind in spec.layer_kinds))
        self._rotaries = [Rotary(rope) for rope in ropes]
        self._rotary_of_layer = [ropes.index(spec.layer_kinds[kind].rope) for kind in spec.layers]

    def forward(self, inputs: ForwardInputs[Metadata], kv: KVCache) -> Tensor:
        """Writes the KV of all tokens and returns their last hidden states, [tokens, hidden]."""
        x = self._embedding(inputs.token_ids)
        tables = [rotary.tables(inputs.positions) for rotary in self._rotaries]
        for layer, rotary, cache in zip(self._layers, self._rotary_of_layer, kv.layers, strict=True):
            x = layer(x, tables[rotary], inputs, cache)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], rows of what `forward` returned. Returns fp32 [rows, vocab]."""
        return self._lm_head(self._norm(hidden))

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return greedy(logits)
