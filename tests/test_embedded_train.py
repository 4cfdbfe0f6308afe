"""The embedded family's training program: the split, the tokenizer, the self-fed chain against a step-by-step rewrite, and the saved layouts."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specgen.draft.checkpoints import aux_layers
from specgen.embedded import corpus as text
from specgen.embedded import evaluate, fit, train
from specgen.embedded.heads import ChainCache, DFlashHead, Eagle3Head, EagleHead, HeadShape, MtpHead, init_weights
from specgen.embedded.target import AUX_LAYERS, generate_ragged, generate_rows, llama_config, target_states

SHAPE = HeadShape(hidden=48, heads=6, kv_heads=2, intermediate=64)
VOCAB = 96


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(llama_config(VOCAB, 48, 6, 6, 2, 64)).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p.mul_(8)  # far from uniform, so that argmax is decided by the context
    return model


def make_head(name: str):
    torch.manual_seed(2)
    made = {
        "eagle": lambda: EagleHead(SHAPE),
        "mtp": lambda: MtpHead(SHAPE),
        "eagle3": lambda: Eagle3Head(SHAPE, torch.arange(1, VOCAB, 2), VOCAB),
    }
    head = made[name]()
    init_weights(head, 0.2)
    return head.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("family") / "family"
    log = train.main(["--out", str(folder), "--log", str(folder.parent / "log.json"), "--tar", str(folder.parent / "family.tar"), "--tiny",
                      "--steps", "16", "--draft-steps", "16", "--skip-reference"])  # fmt: skip
    return folder, log


def header(path) -> dict[str, tuple[str, list[int]]]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + size])
    return {k: (v["dtype"], v["shape"]) for k, v in entries.items() if k != "__metadata__"}


def test_the_split_is_by_file_and_shares_no_text():
    documents = text.read_documents(limit_files=40)
    held = {d.path for d in documents if d.held}
    assert held and held.isdisjoint({d.path for d in documents if not d.held})
    assert all(d.held == text.is_held_out(d.path) for d in documents)
    assert len({d.text for d in documents}) == len(documents)
    assert {d.kind for d in documents} == {"function", "class", "module"}
    assert all(text.MIN_CHARS <= len(d.text) <= text.MAX_CHARS for d in documents)


def test_documents_are_whole_and_dedented():
    source = "import os\nX = 1\n\nclass A:\n    @property\n    def f(self):\n        return 1\n\nY = 2\n"
    assert list(text.cut(source)) == [
        ("class A:\n    @property\n    def f(self):\n        return 1\n", "class"),
        ("@property\ndef f(self):\n    return 1\n", "function"),
        ("import os\nX = 1\n", "module"),
        ("Y = 2\n", "module"),
    ]
    assert list(text.cut("def broken(:")) == []


def test_packing_keeps_every_token_and_the_mask_keeps_documents_apart():
    rows = [np.arange(10 * i, 10 * i + n, dtype=np.int32) for i, n in enumerate((5, 9, 3, 20))]
    packed = fit.pack(rows, 8, 0)
    kept = packed.document >= 0
    assert sorted(packed.tokens[kept].tolist()) == sorted(x for r in rows for i in range(0, len(r), 8) for x in r[i : i + 8] if len(r) - i > 1)
    mask = fit.document_mask(packed.document)[:, 0]
    for b in range(len(packed)):
        for i in range(8):
            for j in range(8):
                assert mask[b, i, j].item() == (j <= i and packed.document[b, i].item() == packed.document[b, j].item())


def test_held_out_loss_of_packed_rows_equals_that_of_single_documents(target):
    generator = np.random.default_rng(0)
    rows = [generator.integers(3, VOCAB, n).astype(np.int32) for n in (4, 6, 11, 3)]
    total = 0.0
    for r in rows:
        ids = torch.from_numpy(r).long()
        total += float(torch.nn.functional.cross_entropy(target(ids[None]).logits[0, :-1], ids[1:], reduction="sum"))
    assert fit.held_out_loss(target, fit.pack(rows, 12, 0), 2) == pytest.approx(total / sum(len(r) - 1 for r in rows), abs=1e-4)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_one_pass_over_all_chains_equals_each_chain_drafted_alone(target, name):
    """A chain alone: true pairs before its root, then the head's own outputs, one causal pass over the pairs so far at each step."""
    head = make_head(name)
    tokens = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    states = target_states(target, tokens)
    embedded = target.model.embed_tokens(tokens[:, 1:])
    outs = head.chain(embedded, evaluate._but_last(states), 4)
    first = head.first_state(states)
    for root in range(1, 5):  # the last committed pair is root - 1
        fed = first[:, :root]
        for k in range(4):
            alone = head.mix(embedded[:, : root + k], fed, ChainCache())
            difference = (outs[k][:, root - 1 + k] - alone[:, -1]).norm() / alone[:, -1].norm()
            assert difference < 1e-5, (root, k)
            fed = torch.cat([fed, alone[:, -1:]], 1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_parallel_acceptance_equals_drafting_from_every_root(target, temperature):
    """The matches of EAGLE-3 against proposing four tokens at each root, feeding the proposals themselves."""
    head = make_head("eagle3")
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (2, 12), generator=generator)
    noise = torch.empty(2, 12, VOCAB).exponential_(generator=generator).log_().neg_() if temperature else None
    states = target_states(target, tokens)
    match = evaluate.head_matches(head, target, tokens, states, temperature, noise).int().cumprod(-1).sum(-1)
    first, ids = head.first_state(states), head.target_ids
    for b in range(2):
        for root in range(1, 7):
            fed, text_so_far, proposed = first[b : b + 1, :root], tokens[b : b + 1, : root + 1], []
            for k in range(4):
                out = head.mix(target.model.embed_tokens(text_so_far[:, 1:]), fed, ChainCache())[:, -1:]
                z = head.logits(out, target.lm_head.weight)[0, 0]
                z = z / temperature + noise[b, root + 1 + k, ids] if noise is not None else z
                proposed.append(int(ids[z.argmax()]))
                fed, text_so_far = torch.cat([fed, out], 1), torch.cat([text_so_far, torch.tensor([[proposed[-1]]])], 1)
            hits = next((i for i in range(4) if proposed[i] != int(tokens[b, root + 1 + i])), 4)
            assert match[b, root].item() == hits


def test_dflash_block_sees_its_context_and_itself_alone(target):
    torch.manual_seed(4)
    head = DFlashHead(SHAPE, 1, 5, text.PAD)
    init_weights(head, 0.2)
    tokens = torch.randint(3, VOCAB, (1, 10))
    anchors = torch.tensor([[2, 5, 8]])
    weight = target.model.embed_tokens.weight
    out = head(target_states(target, tokens).aux, anchors, tokens, weight)
    assert out.shape == (1, 3, 5, 48)
    changed = tokens.clone()
    changed[0, 6:] = (changed[0, 6:] + 1 - 3) % (VOCAB - 3) + 3
    other = head(target_states(target, changed).aux, anchors, changed, weight)
    torch.testing.assert_close(other[:, :2], out[:, :2])
    assert not torch.allclose(other[:, 2], out[:, 2])


def test_generation_by_cache_and_by_recomputation_agree(target):
    prompts = torch.tensor([[1, 9, 20, 31], [1, 50, 7, 8]])
    both = generate_rows(target, torch.cat([prompts, prompts]), 6, 0.8)[:2]  # the first half is greedy
    tokens, ends = generate_ragged(target, [[1, 9, 20, 31], [1, 50, 7, 8], [1, 9]], 6, 0.0, None)
    for b in range(2):
        assert tokens[b, : ends[b]].tolist() == both[b, : ends[b]].tolist()
    assert (ends - torch.tensor([4, 4, 2]) <= 6).all()


def test_walk_counts_steps_and_accepted_tokens():
    match = torch.zeros(1, 12, evaluate.STEPS, dtype=torch.bool)
    match[0, 2, :3] = True  # root 2 accepts 3, next root 6
    match[0, 6, 1:] = True  # a hit behind a miss is no acceptance
    assert evaluate.walk(match, [2], [12]) == {"mean_length": 2.5, "steps": 2, "rate_per_step": [0.5, 0.5, 0.5, 0.0]}


def test_lookup_proposes_what_followed_the_latest_longest_match():
    row = [1, 5, 6, 7, 9, 6, 7, 8, 5, 6, 7, 8]
    match = evaluate.lookup_matches(torch.tensor([row]), [3], [12])
    assert match[0, 6].tolist() == [False, False, False, False]  # after 6 7 came 9, and here 8
    assert match[0, 9].tolist() == [True, False, False, False]  # after 5 6 came 7 9 6 7, and here 7 8


@pytest.mark.parametrize(("tokens", "fraction"), [([1, 2, 3], 0.0), ([1, 2, 3, 4, 5], 0.0), ([1, 1, 1, 1, 1, 1], 2 / 3)])
def test_repeated_fraction(tokens, fraction):
    assert evaluate.repeated_fraction(tokens) == pytest.approx(fraction)


def test_every_model_is_saved_in_its_published_layout(family):
    folder, log = family
    h, kv, mlp, vocab = 48, 16, 64, log["corpus"]["vocab_size"]

    def attention(prefix: str, width: int = h) -> dict[str, list[int]]:
        return {
            prefix + "q_proj.weight": [h, width],
            prefix + "k_proj.weight": [kv, width],
            prefix + "v_proj.weight": [kv, width],
            prefix + "o_proj.weight": [h, h],
        }

    def gated(prefix: str) -> dict[str, list[int]]:
        return {prefix + "gate_proj.weight": [mlp, h], prefix + "up_proj.weight": [mlp, h], prefix + "down_proj.weight": [h, mlp]}

    def layer(prefix: str) -> dict[str, list[int]]:
        norms = {prefix + n + ".weight": [h] for n in ("input_layernorm", "post_attention_layernorm")}
        return attention(prefix + "self_attn.") | gated(prefix + "mlp.") | norms

    eagle = {"fc.weight": [h, 2 * h], **layer("layers.0.")}
    del eagle["layers.0.input_layernorm.weight"]
    eagle3 = {
        "fc.weight": [h, 3 * h],
        "norm.weight": [h],
        "lm_head.weight": [256, h],
        "d2t": [256],
        "t2d": [vocab],
        "midlayer.hidden_norm.weight": [h],
    }
    eagle3 |= layer("midlayer.") | attention("midlayer.self_attn.", 2 * h)
    mtp = layer("model.layers.6.") | {"model.layers.6." + n + ".weight": [h] for n in ("enorm", "hnorm", "shared_head.norm")}
    mtp["model.layers.6.eh_proj.weight"] = [h, 2 * h]
    own = {"model.embed_tokens.weight": [vocab, h], "model.norm.weight": [h]}
    for i in range(6):
        own |= layer(f"model.layers.{i}.")
    dflash = {"fc.weight": [h, 3 * h], "hidden_norm.weight": [h], "norm.weight": [h], **layer("layers.0.")}
    dflash |= {f"layers.0.self_attn.{n}_norm.weight": [8] for n in "qk"}
    for name, expected in (("eagle", eagle), ("eagle3", eagle3), ("dflash", dflash), ("target", own | mtp)):
        found = header(folder / name / "model.safetensors")
        assert {k: v[1] for k, v in found.items()} == expected
        assert {k: v[0] for k, v in found.items() if v[0] != "BF16"} == ({"d2t": "I64", "t2d": "BOOL"} if name == "eagle3" else {})


def test_configs_name_their_layout(family):
    folder, log = family
    config = {n: json.loads((folder / n / "config.json").read_text()) for n in ("target", "draft_model", "eagle", "eagle3", "dflash")}
    assert config["target"]["num_nextn_predict_layers"] == 1 and "num_nextn_predict_layers" not in config["draft_model"]
    assert config["eagle"]["bias"] is False and config["eagle"]["num_hidden_layers"] == 1
    assert config["eagle3"]["architectures"] == ["LlamaForCausalLMEagle3"] and config["eagle3"]["draft_vocab_size"] == 256
    assert config["eagle3"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert aux_layers(config["eagle3"], 6, folder) == AUX_LAYERS, "read back, the ids name the states the head was trained on"
    assert config["dflash"]["dflash_config"] == {"mask_token_id": 0, "target_layer_ids": [0, 2, 4]} and config["dflash"]["block_size"] == 5
    assert json.loads((folder / "target" / "generation_config.json").read_text())["eos_token_id"] == [2, 6]
    assert {m["name"]: m["folder"] for m in log["models"] if m["name"] in ("target", "mtp")} == {"target": "target", "mtp": "target"}
    assert {m["name"] for m in log["models"]} == {"target", "draft_model", "eagle", "eagle3", "mtp", "dflash"}


def test_d2t_is_an_offset_and_agrees_with_t2d(family):
    from safetensors.torch import load_file

    tensors = load_file(str(family[0] / "eagle3" / "model.safetensors"))
    ids = torch.arange(256) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    assert int(tensors["t2d"].sum()) == 256


def test_transformers_loads_target_and_draft_model(family):
    folder, _ = family
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    assert tokenizer("def f(x):").input_ids[0] == 1 and tokenizer("def f(x):").input_ids.count(1) == 1
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "<s><|user|>hi<|end|><|assistant|>"
    for name in ("target", "draft_model"):
        model = LlamaForCausalLM.from_pretrained(folder / name)
        assert model.dtype == torch.bfloat16
        assert model.config.rope_parameters["rope_theta"] == 10000.0
        assert model(torch.tensor([[1, 5, 9]])).logits.shape == (1, 3, tokenizer.vocab_size)


def test_the_card_and_the_log_carry_the_figures(family):
    folder, log = family
    card = (folder / "README.md").read_text()
    assert "PSF" in card and str(log["target"]["held_out_loss"]) in card and "not measured" in card
    assert set(log["evaluation"]["held_out_heads"]["T0"]["drafters"]) == {"ngram", "draft_model", "eagle", "eagle3", "mtp", "dflash"}
    assert (
        log["command"]
        == "python -m specgen.embedded.train --out OUT --minutes 8.5 --steps 16 --draft-steps 16 --dropout 0.15 --seed 0 --tiny --skip-reference"
    )
    assert log["bytes"]["total"] < 1_000_000 and (folder.parent / "family.tar").stat().st_size > log["bytes"]["target/model.safetensors"]
    assert json.loads((folder.parent / "log.json").read_text())["corpus"] == log["corpus"]


def test_a_saved_corpus_loads_equal(tmp_path):
    made = text.build_corpus(limit_files=4, vocab_size=400)
    text.save_corpus(made, tmp_path)
    back = text.load_corpus(tmp_path)
    assert [r.tolist() for r in back.train] == [r.tolist() for r in made.train] and [r.tolist() for r in back.held] == [r.tolist() for r in made.held]
    assert (back.heads, back.held_heads, back.sizes) == (made.heads, made.held_heads, made.sizes)
    assert back.tokenizer.encode("x = 1").ids == made.tokenizer.encode("x = 1").ids
    assert all(r[0] == text.BOS and r[-1] == text.EOS for r in back.train)
