"""The attention block of a decoder layer, for any grouped-query backend."""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from surefoot.attention.backend import AttentionBackend
from surefoot.attention.forward_inputs import AttentionSpec, ForwardInputs, Metadata
from surefoot.attention.kv_cache import KVPages
from surefoot.config.model_spec import ModelSpec
from surefoot.kernels.rotary import apply_rotary
from surefoot.layers.linear import Linear
from surefoot.layers.norm import HeadRMSNorm


class Attention(Generic[Metadata]):
    def __init__(
        self,
        spec: ModelSpec,
        kind: int,
        qkv: Linear,
        out: Linear,
        qk_norm: HeadRMSNorm | None,
        backend: AttentionBackend[Metadata],
    ) -> None:
        self._spec = spec
        self._how = AttentionSpec(kind, spec.attention_scale, spec.attention_softcap)
        self._qkv = qkv  # rows of q, then k, then v
        self._out = out
        self._qk_norm = qk_norm  # of query heads, then key heads
        self._backend = backend

    def __call__(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], inputs: ForwardInputs[Metadata], cache: KVPages
    ) -> Tensor:
        """x: [tokens, hidden]; rotary: from layers.rotary.Rotary. Writes the tokens' KV, then attends."""
        spec = self._spec
        heads = self._qkv(x).view(x.shape[0], -1, spec.head_dim)
        qk_heads = spec.num_heads + spec.num_kv_heads
        qk = heads[:, :qk_heads]
        if self._qk_norm:
            qk = self._qk_norm(qk)
        rotated = apply_rotary(qk, *rotary)
        q, k = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        cache.write(k, heads[:, qk_heads:], inputs.places[self._how.group])
        return self._out(self._backend.attend(q, cache, inputs.attention, self._how).reshape(x.shape[0], -1))
