"""The target's forward equals transformers: packed and chunked prefill, decoding, trees, auxiliary states; fused and unfused, every fused family."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specgen.config import ModelConfig
from specgen.models.attention import KvPool
from specgen.models.loader import load_target
from specgen.models.target import FusedTarget, Hidden, Target
from specgen.types import Layout

VOCAB = 97
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, max_position_embeddings=128, eos_token_id=None, bos_token_id=None
)
GQA = dict(num_attention_heads=4, num_key_value_heads=2)
PROMPTS = [[5, 17, 3, 88, 41, 9, 60, 2, 33, 71, 12, 50, 44], [8], [90, 1, 64, 27, 13, 7, 55, 20, 31, 4, 76]]


def llama() -> PreTrainedModel:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **GQA, head_dim=16, attention_bias=True, mlp_bias=True, rope_parameters=scaled))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, **GQA, head_dim=8, sliding_window=8))


def qwen2() -> PreTrainedModel:
    yarn = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    options = dict(use_sliding_window=True, sliding_window=6, max_window_layers=2, tie_word_embeddings=True, rope_parameters=yarn)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **GQA, **options))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **GQA, head_dim=16))


def gemma3() -> PreTrainedModel:
    options = dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=5, sliding_window_pattern=2, final_logit_softcapping=3.0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SHAPE, "pad_token_id": 0}, **GQA, **options))


def gemma2() -> PreTrainedModel:  # soft-capped attention
    options = dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=5, final_logit_softcapping=3.0, attn_logit_softcapping=2.0)
    return Gemma2ForCausalLM(Gemma2Config(**{**SHAPE, "pad_token_id": 0}, **GQA, **options))


def gpt_oss() -> PreTrainedModel:  # attention sinks, experts
    options = dict(head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
    return GptOssForCausalLM(GptOssConfig(**{**SHAPE, "pad_token_id": 0}, **GQA, **options))


def deepseek() -> PreTrainedModel:  # keys and values of different sizes
    ranks = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1)
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=4, **ranks, **experts))


def cohere() -> PreTrainedModel:  # scaled logits, layer norm
    return CohereForCausalLM(CohereConfig(**{**SHAPE, "pad_token_id": 0}, **GQA, logit_scale=0.25, use_qk_norm=True))


def phi3() -> PreTrainedModel:  # longrope, always in its short factors here
    rope = {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 6.0]}
    options = dict(original_max_position_embeddings=128, rope_parameters=rope, pad_token_id=0)
    return Phi3ForCausalLM(Phi3Config(**SHAPE, **GQA, **options))


FUSED = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma3": gemma3}
UNFUSED = {"gemma2": gemma2, "gpt_oss": gpt_oss, "deepseek": deepseek, "cohere": cohere, "phi3": phi3}
FAMILIES = {**FUSED, **UNFUSED}
VARIANTS = [(name, True) for name in FUSED] + [(name, False) for name in FAMILIES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Path]]:
    """Tiny random models with every weight (norms and biases included) away from its initial value, and the folders they are saved in."""

    @cache
    def make(name: str) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(7)
        model = FAMILIES[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.set_attn_implementation("eager")  # the one that knows soft-capping and sinks in every version
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture(scope="module", params=VARIANTS, ids=[f"{name}-{'fused' if fuse else 'unfused'}" for name, fuse in VARIANTS])
def pair(request: pytest.FixtureRequest, folders: Callable[[str], tuple[PreTrainedModel, Path]]) -> tuple[PreTrainedModel, Target]:
    """The reference model and the loaded target."""
    name, fuse = request.param
    model, folder = folders(name)
    target = load_target(ModelConfig(source="hf", path=str(folder)), "cpu", "float32", fuse=fuse)
    assert target.fused == fuse == isinstance(target, FusedTarget)
    return model, target


class Rows:
    """A pool with a shuffled block table, and the layouts of its rows."""

    def __init__(self, target: Target, rows: int, page_size: int = 4, capacity: int = 64) -> None:
        self.target, self.page_size, self.capacity = target, page_size, capacity
        width = -(-capacity // page_size)
        pages = torch.randperm(rows * width, generator=torch.Generator().manual_seed(3)) + 1
        self.table = pages.view(rows, width).to(torch.int32)
        self.pool: KvPool = target.make_pool(rows * width + 1, page_size)
        self.length = torch.zeros(rows, dtype=torch.int32)

    def slots(self, row: int, places: torch.Tensor) -> torch.Tensor:
        return self.table[row, places // self.page_size].long() * self.page_size + places % self.page_size

    def prefill(self, chunks: list[list[int]]) -> torch.Tensor:
        """Append one chunk a row in one packed call; logits of every token."""
        starts = self.length.tolist()
        places = [torch.arange(s, s + len(c)) for s, c in zip(starts, chunks, strict=True)]
        slots = torch.cat([self.slots(row, p) for row, p in enumerate(places)])
        cu_q = torch.tensor([0, *torch.tensor([len(c) for c in chunks]).cumsum(0).tolist()], dtype=torch.int32)
        longest, bound = max(len(c) for c in chunks), max(s + len(c) for s, c in zip(starts, chunks, strict=True))
        layout = Layout(torch.cat(places).int(), slots, self.table, self.length.clone(), longest, bound, cu_q=cu_q)
        ids = torch.tensor([i for c in chunks for i in c], dtype=torch.int32)
        self.length += cu_q.diff()
        return self.target.logits(self.target.forward(ids, layout, self.pool).last)

    def window(self, ids: torch.Tensor, depth: torch.Tensor, path: torch.Tensor | None = None, **options: Any) -> Hidden:
        """Uniform forward of ids [B, q_len] at positions length + depth, in window slots length + i; nothing is committed."""
        rows, q_len = ids.shape
        positions = self.length[:, None] + depth
        slots = torch.stack([self.slots(r, self.length[r] + torch.arange(q_len)) for r in range(rows)])
        layout = Layout(
            positions.reshape(-1).int(), slots.reshape(-1), self.table, self.length.clone(), q_len, int(self.length.max()) + q_len, path=path
        )
        return self.target.forward(ids.reshape(-1).int(), layout, self.pool, **options)


def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_packed_prefill_of_unequal_prompts_equals_transformers(pair: tuple[PreTrainedModel, Target]) -> None:
    model, target = pair
    got = Rows(target, len(PROMPTS)).prefill(PROMPTS)
    want = torch.cat([reference_logits(model, p) for p in PROMPTS])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_chunked_prefill_equals_whole(pair: tuple[PreTrainedModel, Target]) -> None:
    _, target = pair
    whole = Rows(target, 2).prefill([PROMPTS[0], PROMPTS[2]])
    rows = Rows(target, 2)
    first = rows.prefill([PROMPTS[0][:7], PROMPTS[2][:7]])
    rest = rows.prefill([PROMPTS[0][7:], PROMPTS[2][7:]])
    n = len(PROMPTS[0])
    got = torch.cat([first[:7], rest[: n - 7], first[7:], rest[n - 7 :]])
    torch.testing.assert_close(got, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
def test_greedy_decoding_equals_generate(pair: tuple[PreTrainedModel, Target], page_size: int) -> None:
    model, target = pair
    rows = Rows(target, len(PROMPTS), page_size)
    ends = torch.tensor([len(p) for p in PROMPTS]).cumsum(0) - 1
    token = rows.prefill(PROMPTS)[ends].argmax(-1)
    outputs = [token]
    for _ in range(31):
        hidden = rows.window(token[:, None], torch.zeros(1, 1, dtype=torch.int32))
        token = target.logits(hidden.last).argmax(-1)
        rows.length += 1
        outputs.append(token)
    got = torch.stack(outputs, 1).tolist()
    for prompt, ids in zip(PROMPTS, got, strict=True):
        with torch.no_grad():
            want = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert ids == want[0, len(prompt) :].tolist()


def test_tree_equals_each_root_path_run_as_a_chain(pair: tuple[PreTrainedModel, Target]) -> None:
    model, target = pair
    prompts = [PROMPTS[0], PROMPTS[2]]
    rows = Rows(target, 2)
    rows.prefill(prompts)
    # Nodes 0..5: 0 root; 1, 2 children of 0; 3, 4 children of 2; 5 child of 3.
    path = torch.tensor([[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1], [0, 2, 3, -1], [0, 2, 4, -1], [0, 2, 3, 5]], dtype=torch.int32).repeat(
        2, 1, 1
    )
    ids = torch.tensor([[11, 22, 33, 44, 55, 66], [6, 5, 4, 3, 2, 1]])
    hidden = rows.window(ids, (path >= 0).sum(-1) - 1, path)
    got = target.logits(hidden.last).view(2, 6, -1)
    for row, prompt in enumerate(prompts):
        for node in range(6):
            chain = [int(ids[row, n]) for n in path[row, node].tolist() if n >= 0]
            torch.testing.assert_close(got[row, node], reference_logits(model, prompt + chain)[-1], atol=1e-4, rtol=0)


def test_aux_and_prenorm_states_equal_hidden_states(pair: tuple[PreTrainedModel, Target]) -> None:
    model, target = pair
    prompt = PROMPTS[0]
    states: dict[str, torch.Tensor] = {}
    hook = model.base_model.norm.register_forward_pre_hook(lambda _, args: states.update(prenorm=args[0][0].clone()))
    with torch.no_grad():
        out = model(torch.tensor([prompt]), output_hidden_states=True)
    hook.remove()
    hidden = Rows(target, 1).window(torch.tensor([prompt]), torch.arange(len(prompt)), aux_layers=(2, 0, 3), prenorm=True)
    want = torch.cat([out.hidden_states[2][0], out.hidden_states[0][0], states["prenorm"]], dim=-1)
    torch.testing.assert_close(hidden.aux, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden.prenorm, states["prenorm"], atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden.last, out.hidden_states[-1][0], atol=1e-4, rtol=0)


def test_embed_gives_the_models_own_input_embeddings(pair: tuple[PreTrainedModel, Target]) -> None:
    model, target = pair
    ids = torch.tensor([3, 0, 96], dtype=torch.int32)
    with torch.no_grad():
        want = model.get_input_embeddings()(ids.long())
    torch.testing.assert_close(target.embed(ids), want, atol=1e-6, rtol=0)
    assert torch.equal(target.embed_weight, model.get_input_embeddings().weight)
    assert torch.equal(target.lm_head_weight, model.get_output_embeddings().weight)


def test_absent_nodes_do_not_disturb_the_others(pair: tuple[PreTrainedModel, Target]) -> None:
    _, target = pair
    rows = Rows(target, 2)
    rows.prefill([PROMPTS[0], PROMPTS[2]])
    got = rows.window(torch.tensor([[11, 22, -1], [6, -1, -1]]), torch.arange(3)).last.view(2, 3, -1)
    assert torch.isfinite(got).all()
    want = rows.window(torch.tensor([[11, 22], [6, 0]]), torch.arange(2)).last.view(2, 2, -1)
    torch.testing.assert_close(got[:, 0], want[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(got[0, 1], want[0, 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FUSED)
def test_deterministic_logits_are_the_same_bits_in_prefill_chunks_trees_and_decoding(
    name: str, folders: Callable[[str], tuple[PreTrainedModel, Path]]
) -> None:
    target = load_target(ModelConfig(source="hf", path=str(folders(name)[1])), "cpu", "float32")
    target.make_deterministic()
    prompt = PROMPTS[0]
    whole = Rows(target, 3).prefill([prompt, *PROMPTS[1:]])[: len(prompt)]
    rows = Rows(target, 1, page_size=16)
    chunked = torch.cat([rows.prefill([prompt[:7]]), rows.prefill([prompt[7:11]])])
    # The last two tokens as a tree: node 1 is a wrong guess, node 2 the right one.
    path = torch.tensor([[[0, -1], [0, 1], [0, 2]]], dtype=torch.int32)
    hidden = rows.window(torch.tensor([[prompt[11], 1, prompt[12]]]), torch.tensor([0, 1, 1]), path)
    tree = target.logits(hidden.last)[[0, 2]]
    one_by_one = []
    for token in prompt[11:]:
        one_by_one.append(target.logits(rows.window(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int32)).last))
        rows.length += 1
    assert torch.equal(torch.cat([chunked, tree]), whole)
    assert torch.equal(torch.cat(one_by_one), tree)
