"""The target's forward equals transformers: packed and chunked prefill, decoding, trees, auxiliary states; fused and unfused, every fused family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specgen.config import ModelConfig
from specgen.models.attention import KvPool
from specgen.models.loader import load_target
from specgen.models.target import FusedTarget, Target
from specgen.types import Layout

VOCAB = 97
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, max_position_embeddings=128, eos_token_id=None, bos_token_id=None)
GQA = dict(num_attention_heads=4, num_key_value_heads=2)
PROMPTS = [[5, 17, 3, 88, 41, 9, 60, 2, 33, 71, 12, 50, 44], [8], [90, 1, 64, 27, 13, 7, 55, 20, 31, 4, 76]]


def llama() -> PreTrainedModel:
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
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


FAMILIES = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma3": gemma3}


@pytest.fixture(scope="module", params=list(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A tiny random model with every weight (norms and biases included) away from its initial value, and the folder it is saved in."""
    torch.manual_seed(7)
    model = FAMILIES[request.param]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module", params=["fused", "unfused"])
def pair(request: pytest.FixtureRequest, saved: tuple[PreTrainedModel, Path]) -> tuple[PreTrainedModel, Target]:
    """The reference model and the loaded target, in both implementations."""
    model, folder = saved
    target = load_target(ModelConfig(source="hf", path=str(folder)), "cpu", "float32", fuse=request.param == "fused")
    assert target.fused == (request.param == "fused") == isinstance(target, FusedTarget)
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

    def window(self, ids: torch.Tensor, depth: torch.Tensor, path: torch.Tensor | None = None, **options: object) -> object:
        """Uniform forward of ids [B, q_len] at positions length + depth, in window slots length + i; nothing is committed."""
        rows, q_len = ids.shape
        positions = self.length[:, None] + depth
        slots = torch.stack([self.slots(r, self.length[r] + torch.arange(q_len)) for r in range(rows)])
        layout = Layout(positions.reshape(-1).int(), slots.reshape(-1), self.table, self.length.clone(), q_len, int(self.length.max()) + q_len, path=path)
        return self.target.forward(ids.reshape(-1).int(), layout, self.pool, **options)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_greedy_decoding_equals_generate(pair: tuple[PreTrainedModel, Target], page_size: int) -> None:
    model, target = pair
    rows = Rows(target, len(PROMPTS), page_size)
    ends = torch.tensor([len(p) for p in PROMPTS]).cumsum(0) - 1
    token = rows.prefill(PROMPTS)[ends].argmax(-1)
    outputs = [token]
    for _ in range(31):
        hidden = rows.window(token[:, None], torch.zeros(1, 1, dtype=torch.int32))
        token = target.logits(hidden.last).argmax(-1)  # type: ignore[attr-defined]
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
    path = torch.tensor([[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1], [0, 2, 3, -1], [0, 2, 4, -1], [0, 2, 3, 5]], dtype=torch.int32).repeat(2, 1, 1)
    ids = torch.tensor([[11, 22, 33, 44, 55, 66], [6, 5, 4, 3, 2, 1]])
    hidden = rows.window(ids, (path >= 0).sum(-1) - 1, path)
    got = target.logits(hidden.last).view(2, 6, -1)  # type: ignore[attr-defined]
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
    torch.testing.assert_close(hidden.aux, want, atol=1e-4, rtol=0)  # type: ignore[attr-defined]
    torch.testing.assert_close(hidden.prenorm, states["prenorm"], atol=1e-4, rtol=0)  # type: ignore[attr-defined]
    torch.testing.assert_close(hidden.last, out.hidden_states[-1][0], atol=1e-4, rtol=0)  # type: ignore[attr-defined]


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
    ids = torch.tensor([[11, 22, -1], [6, -1, -1]])
    depth = torch.arange(3)
    got = rows.window(ids, depth).last.view(2, 3, -1)  # type: ignore[attr-defined]
    want = rows.window(ids.clamp(min=40), depth.clone()).last.view(2, 3, -1)  # type: ignore[attr-defined]
    assert torch.isfinite(got).all()
    only = rows.window(ids[:, :1], depth[:1]).last.view(2, 1, -1)  # type: ignore[attr-defined]
    torch.testing.assert_close(got[:, :1], only, atol=1e-5, rtol=0)
    assert want.shape == got.shape
