"""Frequencies and magnitudes at the sizes of real models, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from surefoot.config.hf_config import HFConfig
from surefoot.config.hf_rope import read_rope
from surefoot.config.model_spec import LongRopeScaling, Rope
from surefoot.layers.rotary import Rotary, inverse_frequencies

MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {  # head size, context, rope
    "Llama 3.1": (
        128,
        131_072,
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Qwen 2.5 at 128k": (
        128,
        131_072,
        {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32_768,
        },
    ),
    "Yarn without whole bounds": (
        64,
        131_072,
        {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "Yarn in a short context": (
        16,
        64,
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 4},
    ),
    "linear": (256, 131_072, {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}),
    "dynamic": (96, 4096, {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 8.0}),
}


@pytest.mark.parametrize("head_dim, context, parameters", MODELS.values(), ids=MODELS.keys())
def test_frequencies(head_dim: int, context: int, parameters: dict[str, Any]) -> None:
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=context, rope_parameters=dict(parameters))
    wanted, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    rope = read_rope(
        HFConfig("config.json", {"max_position_embeddings": context, "rope_parameters": parameters}), head_dim, "llama"
    )
    torch.testing.assert_close(inverse_frequencies(rope), wanted, rtol=3e-7, atol=0)
    assert_magnitude(rope, magnitude)


@pytest.mark.parametrize("ratio", [1, 32])
def test_longrope_magnitude(ratio: int) -> None:
    parameters = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    sizes = {"max_position_embeddings": 4096 * ratio, "original_max_position_embeddings": 4096}
    config = Phi3Config(**sizes, rope_parameters=dict(parameters))
    magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")[1]
    rope = read_rope(HFConfig("config.json", {**sizes, "rope_parameters": parameters}), 96, "phi3")
    assert isinstance(rope.scaling, LongRopeScaling)
    assert rope.scaling.attention_factor == pytest.approx(magnitude)
    with pytest.raises(ValueError, match="have not been chosen"):
        Rotary(rope)


def assert_magnitude(rope: Rope, magnitude: float) -> None:
    cos, signed_sin = Rotary(rope).tables(torch.tensor([0, 1, 1000]))
    torch.testing.assert_close((cos**2 + signed_sin**2).sqrt(), torch.full_like(cos, magnitude))
