"""models.decoder.Decoder with a whole step in one call of native code: the same model, and what computes it on CPUs.

It holds the weights in the kernels' order, quantised as the checkpoint has them where a kernel reads that.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from surefoot.attention.forward_inputs import ForwardInputs
from surefoot.attention.kv_cache import KVCache
from surefoot.attention.native_backend import NativeMetadata
from surefoot.config.model_spec import ModelSpec
from surefoot.kernels.packed_linear import FP16_MAX
from surefoot.layers.rotary import Rotary
from surefoot.models.weights import Blocks, WeightSource
from surefoot.native import kernels
from surefoot.native.kernels import ACTIVATIONS, Kernels, PackedWeight, WeightFormat


class NativeDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        weight_dtype: str,
        kv: KVCache,
        page_size: int,
        max_tokens: int,
        library: Kernels,
    ) -> None:
        """weight_dtype: "stored", "float16" or "float32"; max_tokens: of a step.

        ValueError if a weight does not fit fp16.
        """
        self._lib, self._pool = library.lib, library.pool
        self._spec = spec
        self._hidden_size = spec.hidden_size
        self._kept: list[object] = [library, kv]  # whatever the structures point to
        self._pack = _Packer(library, weight_dtype)
        ropes = list(dict.fromkeys(kind.rope for kind in spec.layer_kinds))
        embedding = self._matrix(weights, "embedding", False)
        lm_head = embedding if spec.tied_embeddings else self._matrix(weights, "lm_head", False)
        layers = (kernels.Layer * spec.num_layers)(
            *(
                self._layer(i, weights, kv, ropes.index(spec.layer_kinds[kind].rope))
                for i, kind in enumerate(spec.layers)
            )
        )
        self._decoder = kernels.Decoder(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=page_size,
            activation=ACTIVATIONS[spec.activation],
            num_ropes=len(ropes),
            norm_eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            attention_softcap=spec.attention_softcap,
            embedding_scale=spec.embedding_scale,
            logits_softcap=spec.logits_softcap,
            layers=layers,
            ropes=(kernels.Rope * len(ropes))(*(self._rope(Rotary(rope)) for rope in ropes)),
            windows=(ctypes.c_int32 * len(spec.layer_kinds))(*(kind.window for kind in spec.layer_kinds)),
            norm=self._vector(weights.take("norm")),
            embedding=embedding,
            lm_head=lm_head,
        )
        floats = self._lib.decoder_buffer_floats(self._decoder, max_tokens)
        self._logits = torch.empty(0, spec.vocab_size)  # the system takes as long to hand out such memory as a head
        self._buffer = kernels.zeros_in_huge_pages(floats * 4)  # untouched until a step is that large

    def forward(self, inputs: ForwardInputs[NativeMetadata], kv: KVCache) -> Tensor:
        """Writes the KV of all tokens and returns their last hidden states, [tokens, hidden]."""
        assert kv in self._kept
        tokens = len(inputs.token_ids)
        hidden = torch.empty(tokens, self._hidden_size)
        rows = inputs.attention.rows
        step = kernels.Step(
            tokens,
            rows.shape[1],
            inputs.token_ids.data_ptr(),
            inputs.positions.data_ptr(),
            inputs.places.data_ptr(),
            rows.ctypes.data,
            hidden.data_ptr(),
            self._buffer.ctypes.data,
        )
        self._lib.decoder_forward(self._pool, self._decoder, step)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], rows of what `forward` returned. Returns fp32 [rows, vocab], which the next call
        overwrites."""
        normed = hidden.clone()
        if len(self._logits) < len(hidden):
            self._logits = torch.empty(len(hidden), self._spec.vocab_size)
        logits = self._logits[: len(hidden)]
        if len(hidden):
            self._lib.decoder_logits(self._pool, self._decoder, normed.data_ptr(), len(hidden), logits.data_ptr())
        return logits

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As kernels.sampling.greedy."""
        ids = torch.empty(len(logits), dtype=torch.int64)
        finite = torch.empty(len(logits), dtype=torch.bool)
        rows, vocab = logits.shape
        self._lib.greedy(self._pool, logits.data_ptr(), rows, vocab, ids.data_ptr(), finite.data_ptr())
        return ids, finite

    def _layer(self, index: int, weights: WeightSource, kv: KVCache, rope: int) -> kernels.Layer:
        spec, pages = self._spec, kv.layers[index]

        def vector(name: str, there: bool = True) -> int | None:
            return self._vector(weights.take(f"layers.{index}.{name}")) if there else None

        def matrix(name: str, bias: bool) -> kernels.Linear:
            return self._matrix(weights, f"layers.{index}.{name}", bias)

        return kernels.Layer(
            attention_norm=vector("attention_norm"),
            mlp_norm=vector("mlp_norm"),
            post_attention_norm=vector("post_attention_norm", spec.post_norms),
            post_mlp_norm=vector("post_mlp_norm", spec.post_norms),
            qk_norm=self._qk_norm(index, weights) if spec.qk_norm else None,
            qkv=matrix("qkv", spec.qkv_bias),
            attention_out=matrix("attention_out", spec.attention_out_bias),
            gate_up=matrix("gate_up", spec.mlp_bias),
            down=matrix("down", spec.mlp_bias),
            keys=pages.keys.data_ptr(),
            values=pages.values.data_ptr(),
            kv_group=spec.layers[index],
            rope=rope,
        )

    def _qk_norm(self, index: int, weights: WeightSource) -> int:
        q = weights.take(f"layers.{index}.q_norm").expand(self._spec.num_heads, -1)
        k = weights.take(f"layers.{index}.k_norm").expand(self._spec.num_kv_heads, -1)
        return self._vector(torch.cat((q, k)))

    def _rope(self, rotary: Rotary) -> kernels.Rope:
        frequencies = rotary.inverse_frequencies
        return kernels.Rope(self._vector(frequencies), 2 * len(frequencies), rotary.magnitude)

    def _vector(self, values: Tensor) -> int:
        values = values.float().contiguous()
        self._kept.append(values)
        return values.data_ptr()

    def _matrix(self, weights: WeightSource, name: str, bias: bool) -> kernels.Linear:
        weight = self._pack(name, weights)
        if bias:
            weight.struct.bias = self._vector(weights.take(f"{name}_bias"))
        self._kept.append(weight)
        return weight.struct


class _Packer:
    """Matrices in the kernels' order and in the format that was decided."""

    def __init__(self, library: Kernels, weight_dtype: str) -> None:
        self._library = library
        self._weight_dtype = weight_dtype

    def __call__(self, name: str, weights: WeightSource) -> PackedWeight:
        taken = weights.take_stored(name) if self._weight_dtype == "stored" else weights.take(name)
        if isinstance(taken, Blocks):
            return self._library.pack(_FORMAT_OF_BLOCKS[taken.format], taken.rows, taken.inputs)
        if self._weight_dtype == "float32":
            return self._library.pack("w32", taken.contiguous().numpy(), taken.shape[1])
        largest = float(taken.abs().max())
        if not largest <= FP16_MAX:
            raise ValueError(f"{name}: a weight of magnitude {largest} does not fit fp16: use --weight-dtype float32")
        return self._library.pack("w16", taken.half().contiguous().numpy(), taken.shape[1])


_FORMAT_OF_BLOCKS: dict[str, WeightFormat] = {"q4_1": "w4", "q8_0": "w8"}
