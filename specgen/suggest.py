"""Which key did they mean? First the names other engines use, then edit distance.

Boundary: names only; knows nothing of values, Hydra or files. A suggestion is a key of specgen, never a way to add one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Names of vLLM, SGLang and transformers (and of scripts around them), without section, in lower case and with underscores.
ALIASES: dict[str, str] = {
    # the draft
    "num_speculative_tokens": "draft.num_steps",
    "speculative_num_steps": "draft.num_steps",
    "num_assistant_tokens": "draft.num_steps",
    "speculative_tokens": "draft.num_steps",
    "num_speculative_steps": "draft.num_steps",
    "prompt_lookup_num_tokens": "draft=ngram",
    "prompt_lookup_max": "draft=ngram",
    "prompt_lookup_min": "draft=ngram",
    "steps": "draft.num_steps",
    "depth": "draft.num_steps",
    "gamma": "draft.num_steps",
    "speculative_eagle_topk": "draft.topk",
    "eagle_topk": "draft.topk",
    "speculative_num_draft_tokens": "draft.num_draft_tokens",
    "total_tokens": "draft.num_draft_tokens",
    "tree_size": "draft.num_draft_tokens",
    "speculative_model": "draft.path",
    "speculative_draft_model_path": "draft.path",
    "speculative_draft_model": "draft.path",
    "draft_model_path": "draft.path",
    "assistant_model": "draft.path",
    "speculative_algorithm": "draft",
    "speculative_config": "draft",
    "speculation_type": "draft",
    "speculative_method": "draft",
    "method": "draft",
    "drafter": "draft",
    "simulate_acc_len": "draft.simulate_acceptance_length",
    "sglang_simulate_acc_len": "draft.simulate_acceptance_length",
    # the model
    "model_path": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "pretrained": "model.path",
    "checkpoint": "model.path",
    "torch_dtype": "model.dtype",
    "precision": "model.dtype",
    "device_map": "model.device",
    "max_model_len": "model.max_length",
    "max_seq_len": "model.max_length",
    "context_length": "model.max_length",
    "max_position_embeddings": "model.max_length",
    # sampling
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_tokens": "sampling.max_tokens",
    "max_output_tokens": "sampling.max_tokens",
    "max_gen_toks": "sampling.max_tokens",
    "n_predict": "sampling.max_tokens",
    "min_new_tokens": "sampling.min_tokens",
    "do_sample": "sampling.temperature",
    "temp": "sampling.temperature",
    "nucleus": "sampling.top_p",
    "stop_strings": "sampling.stop",
    "stop_sequences": "sampling.stop",
    "until": "sampling.stop",
    "eos_token_id": "sampling.stop_token_ids",
    "include_stop_str_in_output": "sampling.include_stop",
    "no_stop_trim": "sampling.include_stop",
    "num_return_sequences": "sampling.n",
    "best_of": "sampling.n",
    "num_samples": "sampling.n",
    "random_seed": "sampling.seed",
    "sampling_seed": "sampling.seed",
    "sequence_bias": "sampling.logit_bias",
    "suppress_tokens": "sampling.banned_token_ids",
    "bad_words_ids": "sampling.banned_token_ids",
    "logits_bias": "sampling.logit_bias",
    "json_schema": "sampling.grammar",
    "guided_json": "sampling.grammar",
    "structured_outputs": "sampling.grammar",
    "regex": "sampling.grammar",
    "ebnf": "sampling.grammar",
    "generation_config": "sampling.from_model",
    "output_scores": "sampling.logprobs",
    "top_logprobs": "sampling.logprobs",
    # the engine
    "gpu_memory_utilization": "engine.memory_fraction",
    "mem_fraction_static": "engine.memory_fraction",
    "kv_cache_memory_bytes": "engine.kv_memory_gb",
    "max_num_seqs": "engine.max_batch",
    "max_running_requests": "engine.max_batch",
    "batch_size": "engine.max_batch",
    "max_batch_size": "engine.max_batch",
    "max_num_batched_tokens": "engine.prefill_tokens",
    "chunked_prefill_size": "engine.prefill_tokens",
    "max_prefill_tokens": "engine.prefill_tokens",
    "block_size": "engine.page_size",
    "enforce_eager": "engine.cuda_graphs",
    "disable_cuda_graph": "engine.cuda_graphs",
    "cuda_graph": "engine.cuda_graphs",
    "disable_overlap_schedule": "engine.overlap",
    "async_scheduling": "engine.overlap",
    "enable_deterministic_inference": "engine.deterministic",
    "batch_invariant": "engine.deterministic",
    # rows in and out
    "dataset": "data.path",
    "dataset_path": "data.path",
    "dataset_name": "data.name",
    "data_path": "data.path",
    "input": "data.path",
    "input_file": "data.path",
    "num_prompts": "data.limit",
    "num_rows": "data.limit",
    "max_samples": "data.limit",
    "system": "data.system_prompt",
    "apply_chat_template": "data.as_chat",
    "tasks": "task",
    "output_dir": "output.dir",
    "output_path": "output.dir",
    "output_file": "output.dir",
    "save_dir": "output.dir",
    "out": "output.dir",
    "output": "output.dir",
}

# The same word means different keys in different sections.
SECTION_ALIASES: dict[str, str] = {
    "sampling.topk": "sampling.top_k",
    "sampling.k": "sampling.top_k",
    "sampling.topp": "sampling.top_p",
    "sampling.max_length": "sampling.max_tokens",
    "sampling.eos": "sampling.stop_token_ids",
    "draft.top_k": "draft.topk",
    "draft.k": "draft.topk",
    "draft.branching": "draft.topk",
    "draft.model": "draft.path",
    "draft.tokens": "draft.num_draft_tokens",
    "model.name": "model.path",
    "data.file": "data.path",
    "data.id": "data.id_field",
    "data.dataset": "data.path",
    "data.subset": "data.name",
    "data.config": "data.name",
    "max_length": "model.max_length",
}


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name nearest to ``name``, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def suggest_key(key: str, known: Iterable[str]) -> str | None:
    """The key (or ``group=option``) meant by an unknown ``key``; None when nothing is near."""
    keys = sorted(known)
    plain = key.lower().lstrip("-").replace("-", "_")
    section, _, last = plain.rpartition(".")
    if plain in SECTION_ALIASES:
        return SECTION_ALIASES[plain]
    for name in (plain, last):
        if name in ALIASES:
            return ALIASES[name]
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    if section and (near := closest(last, siblings)):
        return siblings[near]
    exact = [k for k in keys if k.rpartition(".")[2] == last]
    if exact:
        return exact[0]
    if whole := closest(plain, keys):
        return whole
    by_last = {k.rpartition(".")[2]: k for k in keys}
    near = closest(last, by_last, cutoff=0.75)
    return by_last[near] if near else None


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The error line for an unknown key."""
    meant = suggest_key(key, known)
    hint = f"did you mean {meant}?" if meant else "python -m specgen --help lists all keys"
    return f"unknown key {key}: {hint}"
