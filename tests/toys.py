"""Tiny checkpoints whose right outputs are known exactly (``oracles.py`` knows them).

Boundary: writes Hugging Face folders with numpy, safetensors and tokenizers; it never imports specgen.

Table models. A Llama whose attention and MLP write nothing passes the token's embedding through its residual stream, so with one-hot embeddings
and a final norm of 1/8 over 64 channels the logits after token t are column t of the head, exactly in float32: a lookup table. Word ``wNN`` is id
NN, ids 0 to 3 are special. Chains of the target: 10 11 12 13 14 EOS; the 5-cycle 30..34; the 3-cycle 40..42; 24 25 <|eot|> 26 27; 5 EOS.
``rand_target`` and ``rand_draft`` have ordinary random weights (the draft is the target with noise): they show what a lookup cannot, faults of the
KV cache.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

HIDDEN, VOCAB, INNER, HEADS, HEAD_DIM = 64, 48, 128, 2, 32
PAD, BOS, EOS, EOT = 0, 1, 2, 3
WORDS = ["<pad>", "<s>", "</s>", "<|eot|>"] + [f"w{i:02d}" for i in range(4, VOCAB)]
TOP, SECOND = 8.0, 4.0
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m['content'] }} {% endfor %}"
)
CHAINS = ((10, 11, 12, 13, 14, EOS, 20, 21, 22, 10), (30, 31, 32, 33, 34, 30), (40, 41, 42, 40), (24, 25, EOT, 26, 27, 24), (5, EOS))

Tensors = dict[str, np.ndarray]


def _successors() -> list[int]:
    table = [30] * VOCAB
    for chain in CHAINS:
        for token, after in pairwise(chain):
            table[token] = after
    return table


SUCCESSOR = _successors()
# The second choice after each token: an ordinary word, which penalties and min_tokens bring to the front.
RUNNER_UP = [4 + i % 20 if (after + 7) % VOCAB < 4 else (after + 7) % VOCAB for i, after in enumerate(SUCCESSOR)]

# The laws of the stochastic pair, the same after every token, and the draft's, reversed.
TARGET_LAW = {30: 0.5, 31: 0.25, 32: 0.125, 33: 0.0625, 34: 0.0625}
DRAFT_LAW = dict(zip(TARGET_LAW, reversed(TARGET_LAW.values()), strict=True))

# Successors of the draft models.
NEVER = [46 if after == 47 else 47 for after in SUCCESSOR]
HALF = [after if token % 2 == 0 else 47 for token, after in enumerate(SUCCESSOR)]


# -- weights ----------------------------------------------------------------------------------------------------------------------------------


def head_table(successor: Sequence[int], rows: int = VOCAB, second: Sequence[int] | None = RUNNER_UP) -> np.ndarray:
    """The head [rows, HIDDEN] of a table model: 8 at the successor, 4 at the runner-up, else distinct small negatives."""
    head = np.zeros((rows, HIDDEN), np.float32)
    head[:, :VOCAB] = -np.arange(rows)[:, None] / 64
    for token in range(VOCAB):
        if second is not None:
            head[second[token], token] = SECOND
        head[successor[token], token] = TOP
    return head


def law_table(law: dict[int, float]) -> np.ndarray:
    """The head of a model whose next-token law is ``law`` after every token."""
    head = np.full((VOCAB, HIDDEN), -60.0, np.float32)
    for token, p in law.items():
        head[token] = np.log(p)
    return head


def table_model(head: np.ndarray, layers: int = 8) -> Tensors:
    """A Llama that looks its logits up in ``head``; attention runs, and adds nothing."""
    rng = np.random.default_rng(0)

    def small(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    found: Tensors = {"model.embed_tokens.weight": np.eye(head.shape[0], HIDDEN, dtype=np.float32)}
    for layer in range(layers):
        found |= _layer(f"model.layers.{layer}.", small)
    return found | {"model.norm.weight": np.full(HIDDEN, 0.125, np.float32), "lm_head.weight": head}


def _layer(prefix: str, small: Callable[..., np.ndarray], inputs: int = HIDDEN, head_dim: int = HEAD_DIM, heads: int = HEADS) -> Tensors:
    """One decoder layer whose output projections are zero."""
    return {
        f"{prefix}self_attn.q_proj.weight": small(heads * head_dim, inputs),
        f"{prefix}self_attn.k_proj.weight": small(head_dim, inputs),
        f"{prefix}self_attn.v_proj.weight": small(head_dim, inputs),
        f"{prefix}self_attn.o_proj.weight": np.zeros((HIDDEN, heads * head_dim), np.float32),
        f"{prefix}mlp.gate_proj.weight": small(INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": small(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": np.zeros((HIDDEN, INNER), np.float32),
        f"{prefix}input_layernorm.weight": np.ones(HIDDEN, np.float32),
        f"{prefix}post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
    }


def wide_heads_model() -> Tensors:
    """The table target with 4 heads of 32 over a hidden size of 64: head_dim x heads is not the hidden size."""
    rng = np.random.default_rng(0)
    found = table_model(head_table(SUCCESSOR), layers=0)
    for layer in range(2):
        found |= _layer(f"model.layers.{layer}.", lambda *shape: (rng.standard_normal(shape) * 0.05).astype(np.float32), heads=4)
    return found


def random_model(seed: int = 1, layers: int = 4) -> Tensors:
    """Ordinary random weights. The order of the draws is part of what ``tests/data/expected_rand.json`` was computed from."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, columns: int = HIDDEN, scale: float = 0.25) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    found: Tensors = {"model.embed_tokens.weight": draw(VOCAB, scale=0.7)}
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            found[f"{p}{name}.weight"] = draw(rows, columns)
        found[f"{p}input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        found[f"{p}post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    found["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    found["lm_head.weight"] = draw(VOCAB) * 4
    return found


def noisy(tensors: Tensors, seed: int = 3, share: float = 0.04) -> Tensors:
    """The same model with noise on every matrix: it agrees with the original on about half of the tokens."""
    rng = np.random.default_rng(seed)
    return {
        name: value if "norm" in name else (value + rng.standard_normal(value.shape) * value.std() * share).astype(np.float32)
        for name, value in tensors.items()
    }


def stirred(tensors: Tensors, scale: float = 0.15, seed: int = 8) -> Tensors:
    """The same head with an attention and MLP that do write: mostly the same best draft, but every score depends on the whole context."""
    rng = np.random.default_rng(seed)
    changed = {
        name: (rng.standard_normal(value.shape) * scale).astype(np.float32)
        for name, value in tensors.items()
        if name.endswith(("o_proj.weight", "down_proj.weight", "v_proj.weight")) and "model.layers." not in name
    }
    return tensors | changed


def eagle1_head(lies: Sequence[int] = ()) -> Tensors:
    """EAGLE-1: ``fc`` keeps the token's embedding, which is the next feature exactly; after the tokens in ``lies`` it gives another's."""
    fc = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    fc[:, :HIDDEN] = np.eye(HIDDEN)
    for token in lies:
        fc[:, token] = 0
        fc[(token + 1) % HIDDEN, token] = 1
    rng = np.random.default_rng(5)
    layer = _layer("layers.0.", lambda *shape: (rng.standard_normal(shape) * 0.05).astype(np.float32))
    del layer["layers.0.input_layernorm.weight"]
    return {"embed_tokens.weight": np.eye(VOCAB, HIDDEN, dtype=np.float32), "fc.weight": fc} | layer


# The reduced vocabulary of the EAGLE-3 head.
DRAFT_IDS = sorted({SUCCESSOR[after] for after in SUCCESSOR} | set(SUCCESSOR) | {4, 6, 7, 47})


def eagle3_head(lm_head: bool = True) -> Tensors:
    """EAGLE-3 over 26 draft ids. It reads the feature before the root alone, so its first draft is always right; later ones repeat it."""
    head = np.zeros((len(DRAFT_IDS), HIDDEN), np.float32)
    for token in range(VOCAB):
        head[:, token] = -np.arange(len(DRAFT_IDS)) / 64
        head[DRAFT_IDS.index(SUCCESSOR[SUCCESSOR[token]]), token] = TOP
    fc = np.zeros((HIDDEN, 3 * HIDDEN), np.float32)
    fc[:, :HIDDEN] = np.eye(HIDDEN)
    rng = np.random.default_rng(6)
    found = {"fc.weight": fc, "norm.weight": np.full(HIDDEN, 0.125, np.float32), "midlayer.hidden_norm.weight": np.ones(HIDDEN, np.float32)}
    found |= _layer("midlayer.", lambda *shape: (rng.standard_normal(shape) * 0.05).astype(np.float32), inputs=2 * HIDDEN)
    found["d2t"] = np.array([target - draft for draft, target in enumerate(DRAFT_IDS)], np.int64)
    found["t2d"] = np.isin(np.arange(VOCAB), DRAFT_IDS)
    return found | ({"lm_head.weight": head} if lm_head else {})


def mtp_module() -> Tensors:
    """MiMo's MTP layout: ``input_proj`` over [hidden, emb] keeps the embedding, and its final norm is the target's, so every draft is right."""
    rng = np.random.default_rng(7)
    p = "model.mtp_layers.0."
    proj = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    proj[:, HIDDEN:] = np.eye(HIDDEN)
    return {
        f"{p}token_layernorm.weight": np.ones(HIDDEN, np.float32),
        f"{p}hidden_layernorm.weight": np.ones(HIDDEN, np.float32),
        f"{p}input_proj.weight": proj,
        f"{p}final_layernorm.weight": np.full(HIDDEN, 0.125, np.float32),
    } | _layer(p, lambda *shape: (rng.standard_normal(shape) * 0.05).astype(np.float32))


def mtp_row(count: int = 3) -> Tensors:
    """``count`` modules in DeepSeek's layout, each right at its own depth alone: all pass the state of x[p] on as it is, and the head of module k
    looks up the token k + 2 places after x[p]."""
    rng = np.random.default_rng(9)
    found: Tensors = {}
    after = list(SUCCESSOR)
    for k in range(count):
        p, after = f"model.layers.{8 + k}.", [SUCCESSOR[token] for token in after]
        proj = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
        proj[:, HIDDEN:] = np.eye(HIDDEN)
        found |= {f"{p}{name}.weight": np.ones(HIDDEN, np.float32) for name in ("enorm", "hnorm")}
        found |= {f"{p}eh_proj.weight": proj, f"{p}shared_head.norm.weight": np.full(HIDDEN, 0.125, np.float32)}
        found |= {f"{p}shared_head.head.weight": head_table(after), f"{p}embed_tokens.weight": np.eye(VOCAB, HIDDEN, dtype=np.float32)}
        found |= _layer(p, lambda *shape: (rng.standard_normal(shape) * 0.05).astype(np.float32))
    return found


def mimo_row(count: int = 3) -> Tensors:
    """``count`` modules in MiMo's layout that turn the state of a token into its successor's: mostly right at every depth, whatever the noise that
    the embedding and an attention and MLP that do write add, so that runs of accepted drafts depend on every input of every module."""
    rng = np.random.default_rng(10)
    found: Tensors = {}
    for k in range(count):
        p = f"model.mtp_layers.{k}."
        proj = (rng.standard_normal((HIDDEN, 2 * HIDDEN)) * 0.04).astype(np.float32)
        for token in range(VOCAB):
            proj[SUCCESSOR[token], token] += 1
        found |= {f"{p}{name}.weight": np.ones(HIDDEN, np.float32) for name in ("token_layernorm", "hidden_layernorm")}
        found |= {f"{p}input_proj.weight": proj, f"{p}final_layernorm.weight": np.full(HIDDEN, 0.125, np.float32)}
        found |= _layer(p, lambda *shape: (rng.standard_normal(shape) * 0.05).astype(np.float32))
    return found | stirred(found, scale=0.1, seed=11)


def random_row(count: int = 3, layers: int = 4, qwen: bool = False) -> Tensors:
    """``count`` modules of ordinary random weights over ``random_model``: in DeepSeek's layout, heads and embeddings their own, or in Qwen's."""
    rng = np.random.default_rng(12)

    def draw(*shape: int, scale: float = 0.25) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + rng.standard_normal(HIDDEN) * 0.1).astype(np.float32)

    found: Tensors = {}
    for k in range(count):
        p, layer = f"model.layers.{layers + k}.", f"mtp.layers.{k}." if qwen else f"model.layers.{layers + k}."
        outer = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
        names = outer if qwen else (f"{p}enorm", f"{p}hnorm", f"{p}shared_head.norm", f"{p}eh_proj")
        found |= {f"{name}.weight": norm() for name in names[:3]} | {f"{names[3]}.weight": draw(HIDDEN, 2 * HIDDEN)}
        found |= _layer(layer, draw)
        found |= {f"{layer}{name}.weight": draw(HIDDEN, width) for name, width in (("self_attn.o_proj", HEADS * HEAD_DIM), ("mlp.down_proj", INNER))}
        if not qwen:
            found |= {f"{p}shared_head.head.weight": draw(VOCAB, HIDDEN, scale=1.0), f"{p}embed_tokens.weight": draw(VOCAB, HIDDEN, scale=0.7)}
    return found


# -- files ------------------------------------------------------------------------------------------------------------------------------------


def model_config(rows: int, layers: int, **changes: Any) -> dict[str, Any]:
    """A Llama's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": rows,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-12,
        "hidden_act": "silu",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    } | changes


def write_tokenizer(folder: Path, words: Sequence[str], decoder: Any = None) -> None:
    """A word-level tokenizer that splits at blanks and puts <s> in front."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoder or decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<pad>",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write(root: Path, name: str, tensors: Tensors, config: dict[str, Any], words: Sequence[str] | None = WORDS, decoder: Any = None) -> None:
    """One checkpoint folder."""
    folder = root / name
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if words is not None:
        write_tokenizer(folder, words, decoder)


def build(root: Path) -> None:
    """Write every toy under ``root``."""
    head = head_table(SUCCESSOR)
    target = table_model(head)
    write(root, "target", target, model_config(VOCAB, 8))
    write(root, "target_eos_list", target, model_config(VOCAB, 8, eos_token_id=[EOS, EOT]))
    write(root, "target_ctx32", target, model_config(VOCAB, 8, max_position_embeddings=32))
    write(root, "target_vocab64", table_model(head_table(SUCCESSOR, rows=64)), model_config(64, 8))
    broken = dict(target) | {"model.embed_tokens.weight": np.eye(VOCAB, HIDDEN, dtype=np.float32)}
    broken["model.embed_tokens.weight"][45] = np.nan
    write(root, "target_nan45", broken, model_config(VOCAB, 8))
    tied = {name: value for name, value in target.items() if name != "lm_head.weight"}
    write(root, "target_tied", tied, model_config(VOCAB, 8, tie_word_embeddings=True))
    write(root, "target_wide_heads", wide_heads_model(), model_config(VOCAB, 2, num_attention_heads=4))
    overflow = dict(target) | {"lm_head.weight": head * np.float32(16384)}
    write(root, "target_fp16_overflow", overflow, model_config(VOCAB, 8))
    spelled = [*WORDS[:30], "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", *WORDS[34:]]
    write(root, "target_bytes", target, model_config(VOCAB, 8), spelled, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
    mimo = model_config(VOCAB, 8, num_nextn_predict_layers=1)
    write(root, "target_mtp", target | mtp_module(), mimo)
    write(root, "target_mtp_stirred", target | stirred(mtp_module()), mimo)
    write(root, "target_mtp3", target | mtp_row(), model_config(VOCAB, 8, num_nextn_predict_layers=3))
    write(root, "target_mtp3_says_1", target | mtp_row(), model_config(VOCAB, 8, num_nextn_predict_layers=1))
    write(root, "target_mtp1_says_2", target | mtp_row(1), model_config(VOCAB, 8, num_nextn_predict_layers=2))
    write(root, "target_mtp3_stirred", target | mimo_row(), model_config(VOCAB, 8, num_nextn_predict_layers=3))
    write(root, "rand_target_mtp3", random_model() | random_row(), model_config(VOCAB, 4, num_nextn_predict_layers=3))
    write(root, "rand_target_mtp2_qwen", random_model() | random_row(2, qwen=True), model_config(VOCAB, 4, mtp_num_hidden_layers=2))
    write(root, "stoch_target", table_model(law_table(TARGET_LAW), 1), model_config(VOCAB, 1))
    write(root, "stoch_draft", table_model(law_table(DRAFT_LAW), 1), model_config(VOCAB, 1))
    write(root, "stoch_draft_same", table_model(law_table(TARGET_LAW), 1), model_config(VOCAB, 1))
    write(root, "rand_target", random_model(), model_config(VOCAB, 4))
    write(root, "rand_draft", noisy(random_model()), model_config(VOCAB, 4))
    _build_drafts(root, head)


def _build_drafts(root: Path, head: np.ndarray) -> None:
    small = model_config(VOCAB, 2)
    write(root, "draft_perfect", table_model(head, 2), small)
    write(root, "draft_never", table_model(head_table(NEVER, second=None), 2), small)
    write(root, "draft_half", table_model(head_table(HALF, second=None), 2), small)
    trap = head_table(SUCCESSOR, rows=64)
    trap[55, :VOCAB] = 20
    write(root, "draft_vocab64_trap", table_model(trap, 2), model_config(64, 2))
    to_nan = [45 if token == 31 else after for token, after in enumerate(SUCCESSOR)]
    write(root, "draft_to_nan", table_model(head_table(to_nan, second=None), 2), small)
    write(root, "draft_other_tokenizer", table_model(head, 2), small, WORDS[:4] + WORDS[4:][::-1])
    one = model_config(VOCAB, 1, bias=False)
    write(root, "eagle1_perfect", eagle1_head(), one, words=None)
    write(root, "eagle1_lies_on_odd", eagle1_head([i for i in range(VOCAB) if i % 2]), one, words=None)
    write(root, "eagle1_stirred", stirred(eagle1_head()), one, words=None)
    write(root, "eagle1_config_hidden32", eagle1_head(), one | {"hidden_size": 32, "head_dim": 16}, words=None)
    narrow = {name: value[tuple(slice(0, max(1, n // 2)) for n in value.shape)].copy() for name, value in eagle1_head().items()}
    write(root, "eagle1_hidden32", narrow, one | {"hidden_size": 32, "head_dim": 16, "intermediate_size": 64}, words=None)
    three = model_config(VOCAB, 1, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(DRAFT_IDS))
    write(root, "eagle3_d2t", eagle3_head(), three, words=None)
    write(root, "eagle3_stirred", stirred(eagle3_head()), three, words=None)
    write(root, "eagle3_no_lm_head", eagle3_head(lm_head=False), three, words=None)


@cache
def toy_folder() -> Path:
    """The folder of all toys, written once a process and removed at its end."""
    root = Path(tempfile.mkdtemp(prefix="toys-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    build(root)
    return root


def expected_rand() -> list[dict[str, Any]]:
    """Rows of ``tests/data/expected_rand.json``: ``prompt_ids``, ``greedy_32`` and ``accepted``: num_steps -> accepted drafts of each chain step.

    Computed in float64 by full recomputation; the two largest logits are never closer than 0.005. Drafts of a row's last step may pass its end.
    """
    return json.loads((Path(__file__).parent / "data" / "expected_rand.json").read_text())["rows"]
