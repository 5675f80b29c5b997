"""The decoder-only transformer, built from a `ModelSpec`. It holds weights and knows nothing of requests."""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

from surefoot.attention.backend import AttentionBackend
from surefoot.attention.forward_inputs import ForwardInputs, Metadata
from surefoot.attention.kv_cache import KVCache, KVPages
from surefoot.config.model_spec import ModelSpec
from surefoot.kernels.rotary import rotary_tables
from surefoot.layers.attention import Attention
from surefoot.layers.linear import LinearScheme
from surefoot.layers.mlp import GatedMLP
from surefoot.layers.norm import RMSNorm
from surefoot.layers.rotary import inverse_frequencies
from surefoot.layers.vocab import Embedding, LMHead
from surefoot.models.weights import WeightSource


class DecoderLayer(Generic[Metadata]):
    def __init__(
        self,
        spec: ModelSpec,
        prefix: str,
        weights: WeightSource,
        scheme: LinearScheme,
        backend: AttentionBackend[Metadata],
    ) -> None:
        self._attention_norm = RMSNorm(weights.take(f"{prefix}.attention_norm"), spec.norm_eps)
        qkv = scheme.linear(weights.take(f"{prefix}.qkv"))
        attention_out = scheme.linear(weights.take(f"{prefix}.attention_out"))
        self._attention = Attention(spec, qkv, attention_out, backend)
        self._mlp_norm = RMSNorm(weights.take(f"{prefix}.mlp_norm"), spec.norm_eps)
        gate_up = scheme.linear(weights.take(f"{prefix}.gate_up"))
        self._mlp = GatedMLP(gate_up, scheme.linear(weights.take(f"{prefix}.down")))

    def __call__(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], inputs: ForwardInputs[Metadata], cache: KVPages
    ) -> Tensor:
        x = x + self._attention(self._attention_norm(x), rotary, inputs, cache)
        return x + self._mlp(self._mlp_norm(x))


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
        self._embedding = Embedding(embedding, scheme, dtype)
        self._lm_head = LMHead(embedding if spec.tied_embeddings else weights.take("lm_head"), scheme)
        del embedding
        self._layers = [DecoderLayer(spec, f"layers.{i}", weights, scheme, backend) for i in range(spec.num_layers)]
        self._norm = RMSNorm(weights.take("norm"), spec.norm_eps)
        self._inverse_frequencies = inverse_frequencies(spec)

    def forward(self, inputs: ForwardInputs[Metadata], kv: KVCache) -> Tensor:
        """Writes the KV of all tokens and returns their last hidden states, [tokens, hidden]."""
        x = self._embedding(inputs.token_ids)
        rotary = rotary_tables(inputs.positions, self._inverse_frequencies)
        for layer, cache in zip(self._layers, kv.layers, strict=True):
            x = layer(x, rotary, inputs, cache)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], rows of what `forward` returned. Returns fp32 [rows, vocab]."""
        return self._lm_head(self._norm(hidden))
