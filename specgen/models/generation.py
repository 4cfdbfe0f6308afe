"""Sampling defaults that a checkpoint ships in generation_config.json, for ``sampling.from_model=true``.

Boundary: reads one small file and names values by the configuration's keys; knows nothing of requests or of the law they feed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specgen.errors import CheckpointError, ConfigError

# Its keys and ours. ``max_new_tokens`` and ``min_new_tokens`` count output tokens, as ours do.
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "suppress_tokens": "banned_token_ids",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# Keys that change what is generated and have no counterpart, with the value that turns each off.
FOREIGN: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0,
    "length_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "begin_suppress_tokens": None,
    "guidance_scale": 1,
    "stop_strings": None,
    "watermarking_config": None,
}
BEAMS_ONLY = ("length_penalty", "num_beam_groups", "diversity_penalty")  # without beams these do nothing


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """What ``folder``'s generation_config.json says, by the names of ``sampling.*``; a file that is absent says nothing.

    ``do_sample`` false means temperature 0, and true without a temperature 1. Raises ConfigError for a setting that cannot be honoured and
    CheckpointError for a damaged file.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        given = {name: value for name, value in given.items() if value is not None}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({str(error).splitlines()[0]}); set sampling.from_model=false") from error
    for name, off in FOREIGN.items():
        inert = name in BEAMS_ONLY and given.get("num_beams", 1) == 1
        if name in given and given[name] != off and given[name] != [] and not inert:
            raise ConfigError(f"sampling.from_model=true: {path} sets {name}={given[name]!r}, which is not supported; set sampling.from_model=false")
    found = {ours: given[theirs] for theirs, ours in NAMES.items() if theirs in given}
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    elif given.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if name in found:
            try:
                found[name] = float(found[name])
            except (TypeError, ValueError):
                raise ConfigError(
                    f"sampling.from_model=true: {path}: {name}={found[name]!r} is not a number; correct it or set sampling.from_model=false"
                ) from None
    return found
