"""The default model against transformers: 32 prompts, 64 greedy tokens each.

transformers gets the weights as our loader dequantises them, in fp32, and sees each of our sequences whole: if its
most probable token after every prefix is the token that we sampled, then its greedy continuation is ours. Where it is
not, the two tokens must be a near tie: their logits differ by less than NEAR_TIE.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot import LLM, SamplingParams
from surefoot.config.engine_plan import EnginePlan
from surefoot.models.registry import NAMINGS, weight_rules
from surefoot.runner.weight_loader import GGUFTensors
from tests.native_kernels import native_library

NEW_TOKENS = 64
NEAR_TIE = 2e-3  # logits; the two programs' sums differ by up to 1e-4
MAX_TIES = 3  # of 2,048 tokens

SUBJECTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers greater than 10.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
]
RAW = [
    "Once upon a time",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "1, 2, 3, 4,",
    "In 1969, humans first",
    "SELECT name FROM users WHERE",
    "Water boils at",
    "The quick brown fox",
]


def hugging_face_model(plan: EnginePlan, round_to_fp16: bool) -> LlamaForCausalLM:
    """transformers' own Llama. q and k are un-permuted here once more, by the formula of the file's format."""
    spec = plan.model
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.layer_kinds[0].rope.theta},
        max_position_embeddings=spec.max_context,
        tie_word_embeddings=True,
    )
    file = GGUFTensors(Path(plan.checkpoint.path))
    state = {}
    for rule in weight_rules(spec, "gguf").rules:
        for source in rule.sources:
            weight = file.read(source.name)
            if source.interleaved_heads:
                rows = weight.reshape(source.interleaved_heads, spec.head_dim // 2, 2, spec.hidden_size)
                weight = rows.swapaxes(1, 2).reshape(weight.shape)
            state[hugging_face_name(source.name)] = (
                weight.half().float() if round_to_fp16 and weight.dim() > 1 else weight
            )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.float().eval()


def hugging_face_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    layer = parts[1] if parts[0] == "blk" else ""
    gguf, safetensors = NAMINGS["llama"]["gguf"].names, NAMINGS["llama"]["safetensors"].names
    short = {pattern.format(i=layer): short for short, pattern in gguf.items()}[gguf_name]
    return safetensors[short].format(i=layer)


@pytest.mark.parametrize(
    "cpu_kernels, weight_dtype, linear_kernel",
    [("torch", "float32", "dense"), ("torch", "float16", "fp16_packed"), ("auto", "stored", "native")],
    ids=["dense", "fp16_packed", "native"],
)
def test_greedy_tokens_are_those_of_transformers(
    default_model_path: Path, cpu_kernels: str, weight_dtype: str, linear_kernel: str
) -> None:
    if linear_kernel == "native":
        native_library()
    wanted = {"cpu_kernels": cpu_kernels, "weight_dtype": weight_dtype, "max_running_requests": 16}
    with LLM(str(default_model_path), max_model_len=512, **wanted) as llm:
        assert llm.plan.linear_kernel == linear_kernel
        prompts = [llm.tokenizer.encode(text, add_special_tokens=True) for text in RAW]
        for text in SUBJECTS:
            for system in ("", "Answer in one word.", "You are a pirate."):
                messages = [{"role": "system", "content": system}] if system else []
                chat = llm.tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])
                prompts.append(llm.tokenizer.encode(chat, add_special_tokens=False))
        assert len(prompts) == 32
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        completions = llm.generate(prompts, params)
        reference = hugging_face_model(llm.plan, round_to_fp16=weight_dtype == "float16")
        answer = llm.chat([{"role": "user", "content": SUBJECTS[0]}], SamplingParams(temperature=0)).text
    assert answer == "The capital of France is Paris."
    ties = []
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == NEW_TOKENS
        with torch.inference_mode():
            sequence = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
            logits = reference(sequence, logits_to_keep=NEW_TOKENS).logits[0]
        chosen = torch.tensor(completion.token_ids)
        behind = logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0]
        ties += behind[logits.argmax(-1) != chosen].tolist()
    assert all(gap < NEAR_TIE for gap in ties), f"not near ties: {ties}"
    assert len(ties) <= MAX_TIES
