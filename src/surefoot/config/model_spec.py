"""What a checkpoint is. One reader per family makes a `ModelSpec` from config.json or from GGUF metadata."""

from __future__ import annotations

from msgspec import Struct


class NoRopeScaling(Struct, frozen=True, tag="none"):
    pass


class LinearRopeScaling(Struct, frozen=True, tag="linear"):
    """Positions are divided by `factor`."""

    factor: float


class Llama3RopeScaling(Struct, frozen=True, tag="llama3"):
    """Low frequencies are divided by `factor`, high ones are kept, those between are blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


class FactorsRopeScaling(Struct, frozen=True, tag="factors"):
    """Each frequency is divided by its own factor: how GGUF stores Llama 3.1's scaling."""

    factors: tuple[float, ...]  # head_dim / 2


RopeScaling = NoRopeScaling | LinearRopeScaling | Llama3RopeScaling | FactorsRopeScaling


class ModelSpec(Struct, frozen=True):
    family: str  # key of models.registry
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_context: int  # tokens of prompt and output that the model was trained for
    tied_embeddings: bool  # the LM head is the embedding

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_linear_weights(self) -> int:
        """Elements of all matrices of the layers (not of embedding and head)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)
