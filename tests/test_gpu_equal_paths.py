"""One text on every path: CUDA graphs or none, fused or unfused target, plain or drafted. On a CPU the same without graphs, on fewer rows.

In float32 the tokens are equal. In bfloat16 rounding differs between paths, and each row's first difference is judged as the lossless check judges.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import cache

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.load import FAMILY, load_drafter
from specgen.engine import lossless
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams

CUDA = pytest.param("cuda:0", marks=pytest.mark.gpu)
DRAFTS = [("none", 1, 0), ("eagle", 4, 4), ("eagle3", 4, 4)]
PROMPTS = [json.loads(line)["prompt"] for line in (FAMILY / "prompts.jsonl").read_text().splitlines()]
ROWS = {"cpu": 4, "cuda:0": 24}
TOKENS = {"cpu": 16, "cuda:0": 48}
VOCAB = 4096
Texts = list[list[int]]


@cache
def target_on(device: str, dtype: str, fuse: bool) -> Target:
    return load_target(ModelConfig(dtype=dtype, device=device), device, dtype, fuse=fuse)


def requests_on(device: str, temperature: float) -> list[Request]:
    tokenizer = load_tokenizer(str(FAMILY / "target"))
    params = SamplingParams(max_tokens=TOKENS[device], temperature=temperature, seed=7)
    return [Request(Prompt(i, i, tokenizer(text)["input_ids"], key=i), params) for i, text in enumerate(PROMPTS[: ROWS[device]])]


@cache
def generate(device: str, dtype: str, fuse: bool, graphs: str, method: str, topk: int, steps: int, temperature: float) -> Texts:
    """Output ids of the family's prompts on one path. A path with graphs captured some, and every one it asked for."""
    target = target_on(device, dtype, fuse)
    draft = DraftConfig(method=method, topk=topk, num_steps=steps)
    config = EngineConfig(max_batch=16, cuda_graphs=graphs, kv_memory_gb=0.25)
    engine = Engine(target, load_drafter(draft, ModelConfig(device=device), target), config, draft, vocab_limit=VOCAB)
    assert target.fused is fuse and (engine.graphs is not None) is (graphs == "auto" and device != "cpu")
    requests = requests_on(device, temperature)
    engine.run(requests)
    engine.pages.check()
    if engine.graphs is not None:
        assert not engine.graphs.off and len(engine.graphs) > 0
    engine.close()
    if method != "none":
        assert sum(sum(r.counts.accepted) for r in requests) > len(requests), "the drafts take part in the text"
    return [request.output_ids for request in requests]


def paths(device: str) -> list[tuple[bool, str]]:
    """(fuse, graphs) of every path."""
    return list(itertools.product((True, False), ("off",) if device == "cpu" else ("off", "auto")))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_in_float32_every_path_writes_the_same_tokens(device: str, temperature: float) -> None:
    found = {(path, draft): generate(device, "float32", *path, *draft, temperature) for path in paths(device) for draft in DRAFTS}
    first = found[paths(device)[0], DRAFTS[0]]
    assert len({tuple(ids) for ids in first}) == ROWS[device]
    assert [where for where, texts in found.items() if texts != first] == []


# -- bfloat16 ---------------------------------------------------------------------------------------------------------------------------------


@cache
def replaying(device: str) -> Engine:
    """An engine as the lossless check replays rows on."""
    target, draft = target_on(device, "bfloat16", True), DraftConfig(method="none")
    config = EngineConfig(max_batch=1, overlap="0", cuda_graphs="off", kv_memory_gb=0.05)
    return Engine(target, load_drafter(draft, ModelConfig(), target), config, draft, vocab_limit=VOCAB)


def replayed(device: str, temperature: float) -> Texts:
    """Output ids of the rows one by one: the texts that others are judged against, since the judgement asks for the logits of this very run."""
    requests = requests_on(device, temperature)
    for request in requests:
        replaying(device).run([request])
    return [request.output_ids for request in requests]


def judged(device: str, request: Request, ours: list[int], theirs: list[int]) -> lossless.Verdict:
    """The first difference of two texts of a request, ``ours`` the replay's, under the logits that both targets compute there in steps of several
    shapes."""
    n = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if ours == theirs:
        return lossless.Verdict(lossless.EQUAL)
    if n in (len(ours), len(theirs)):
        return lossless.Verdict(lossless.DIFFERENT, n)
    zs = lossless._scores_there(request, tuple(ours[:n]), replaying(device), nodes=17, batch=16)
    ids, unfused = [*request.prompt.token_ids, *ours[:n]], target_on(device, "bfloat16", False)
    with torch.inference_mode():
        others = torch.stack([lossless.window_logits(unfused, ids, width, 1, 16) for width in (1, 17)])[:, :VOCAB].float().cpu()
    return lossless.judge(torch.cat([zs, others]), ours[n], theirs[n], request, n, lossless.LARGEST_E[torch.bfloat16])


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_in_bfloat16_every_difference_between_paths_is_a_near_tie(device: str, temperature: float) -> None:
    first = replayed(device, temperature)
    requests = requests_on(device, temperature)
    for path in paths(device):
        for draft in DRAFTS:
            texts = generate(device, "bfloat16", *path, *draft, temperature)
            verdicts = [judged(device, *row) for row in zip(requests, first, texts, strict=True)]
            kinds = Counter(verdict.kind for verdict in verdicts)
            fused, graphs = "fused" if path[0] else "unfused", "graphs" if path[1] == "auto" else "eager"
            print(f"\n{device} T {temperature} {fused} {graphs} {draft[0]} topk {draft[1]}: {dict(kinds)}")
            assert [v for v in verdicts if v.kind == lossless.DIFFERENT] == [], (path, draft)
            assert kinds[lossless.EQUAL] > 0
