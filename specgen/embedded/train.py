"""The program that made the embedded family: ``python -m specgen.embedded.train --out DIR``.

It reads the running Python's standard library (or a corpus written by ``--prepare``), trains the tokenizer, the target, the target's own text, a
draft model, EAGLE, EAGLE-3, MTP and DFlash, measures them, and trains the stock-trainer reference last. Each model is saved as soon as it is trained.

Boundary: the order of the work, its sizes and its time budget. The pieces are corpus, target, heads, fit, export, evaluate and reference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specgen.embedded import corpus as text
from specgen.embedded import evaluate as ev
from specgen.embedded import export, fit
from specgen.embedded.heads import DFlashHead, Eagle3Head, EagleHead, Head, MtpHead, init_weights, round_to_bf16
from specgen.embedded.reference import train_reference
from specgen.embedded.target import llama_config, on_policy_rows

PROMPTS = Path(__file__).parent / "family" / "prompts.jsonl"


@dataclass
class Sizes:
    """Every size of a run; ``tiny()`` is the smoke test's."""

    vocab: int = 4096
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 448
    draft: tuple[int, int, int, int, int] = (96, 2, 4, 2, 256)  # hidden, layers, heads, KV heads, intermediate
    draft_vocab: int = 2048
    width: int = 768
    batch: int = 85
    budget: int = 49152  # tokens of a drafter's batch
    widths: tuple[int, ...] = (96, 256, 768)
    own_width: int = 256
    own_per_batch: int = 5120
    own_prompts: tuple[int, ...] = (8, 12, 16, 24, 32, 48)
    target_lr: float = 3e-3
    eval_rows: int = 128
    eval_prompt: int = 24
    eval_tokens: int = 128
    limit_files: int | None = None
    checks: int = 12
    block_size: int = 5

    @staticmethod
    def tiny() -> Sizes:
        """A family of the same shape for two CPU cores and a few seconds."""
        return Sizes(
            vocab=512, hidden=48, intermediate=64, draft=(32, 1, 4, 2, 48), draft_vocab=256, width=64, batch=4, budget=256, widths=(32, 64),
            own_width=32, own_per_batch=8, own_prompts=(8, 12), eval_rows=4, eval_prompt=12, eval_tokens=12, limit_files=12, checks=2,
        )  # fmt: skip


@dataclass
class Run:
    """One run: what it was asked, where it stands, and its log (written after every stage)."""

    args: argparse.Namespace
    sizes: Sizes
    device: torch.device
    start: float
    family: Path
    log: dict[str, Any] = field(default_factory=dict)

    def seconds(self, share: float) -> float:
        """A stage's part of the whole time budget."""
        return 60 * float(self.args.minutes) * share

    def save(self, stage: str) -> None:
        """Write the log, the card and the tar as they stand."""
        self.log["seconds"] = round(time.time() - self.start, 1)
        self.log.setdefault("stages", []).append([stage, self.log["seconds"]])
        self.log["bytes"] = export.folder_bytes(self.family)
        export.write_json(self.log, self.args.log)
        (self.family / "README.md").write_text(export.render_card(self.log), encoding="utf-8")
        if self.args.tar is not None:
            export.write_tar(self.family, self.args.tar)
        print(f"== {stage} done at {self.log['seconds']:.0f}s, family {self.log['bytes']['total'] / 1e6:.2f} MB", flush=True)

    def fail(self, stage: str) -> None:
        """Enter the exception being handled into the log's ``failures``; the run ends with exit code 1."""
        self.log.setdefault("failures", {})[stage] = traceback.format_exc()
        print(f"!! {stage} failed\n{traceback.format_exc()}", flush=True)

    def model(self, name: str, folder: str, layout: str, module: nn.Module, result: fit.FitResult | None) -> None:
        """Enter a trained model into the log."""
        self.log.setdefault("models", []).append({"name": name, "folder": folder, "layout": layout, "parameters": export.count_parameters(module)})
        if result is not None:
            self.log[name] = result.as_dict() | {"held_out_loss": result.best}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m specgen.embedded.train", description="Train the embedded family.")
    p.add_argument("--out", type=Path, required=True, help="folder of the family (made if absent)")
    p.add_argument("--log", type=Path, help="training log, JSON (default: OUT/train_log.json)")
    p.add_argument("--tar", type=Path, help="also pack the family into this tar after every stage")
    p.add_argument("--corpus", type=Path, help="a corpus folder written by --prepare instead of the running Python's library")
    p.add_argument("--prepare", action="store_true", help="write the corpus to OUT and stop")
    p.add_argument("--prompts", type=Path, default=PROMPTS, help="prompts for the text figures")
    p.add_argument("--target", type=Path, help="take the trained target (and its tokenizer) from this folder")
    p.add_argument("--previous-log", type=Path, help="the log of the run that made --target (its curve and number of steps)")
    p.add_argument("--only-reference", action="store_true", help="with --target: train the stock-trainer reference and nothing else")
    p.add_argument("--minutes", type=float, default=8.5, help="time budget of the whole run; stages take fixed shares of it")
    p.add_argument("--steps", type=int, default=2000, help="most steps of the target")
    p.add_argument("--draft-steps", type=int, default=1400, help="most steps of each drafter (the draft model: twice as many)")
    p.add_argument("--dropout", type=float, default=0.15, help="residual dropout of the target")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tiny", action="store_true", help="a smoke-test family")
    p.add_argument("--skip-reference", action="store_true", help="do not train the stock-trainer reference")
    p.add_argument("--skip-dflash", action="store_true", help="do not train DFlash")
    args = p.parse_args(argv)
    args.log = args.log or args.out / "train_log.json"
    return args


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats the run: its options, with OUT for the folder and no other path."""
    words = ["python -m specgen.embedded.train --out OUT"]
    for name in ("minutes", "steps", "draft_steps", "dropout", "seed"):
        words.append(f"--{name.replace('_', '-')} {getattr(args, name)}")
    words += ["--" + name.replace("_", "-") for name in ("tiny", "skip_reference", "skip_dflash", "only_reference") if getattr(args, name)]
    return " ".join(words)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program; returns the log."""
    start = time.time()
    args = parse(argv)
    sizes = Sizes.tiny() if args.tiny else Sizes()
    torch.manual_seed(args.seed)
    if args.prepare:
        data = text.build_corpus(limit_files=sizes.limit_files, vocab_size=sizes.vocab, seed=args.seed)
        text.save_corpus(data, args.out)
        print(json.dumps(data.sizes))
        return data.sizes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args, sizes, device, start, args.out)
    data = text.load_corpus(args.corpus) if args.corpus else text.build_corpus(limit_files=sizes.limit_files, vocab_size=sizes.vocab, seed=args.seed)
    run.log |= {
        "command": command_line(args),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "licence": text.LICENCE,
        "corpus": data.sizes,
        "sizes": dict(sizes.__dict__),
        "dropout": args.dropout,
        "seed": args.seed,
    }
    print(f"corpus {json.dumps(data.sizes)} at {time.time() - start:.0f}s", flush=True)
    rows = fit.pack(data.train + data.chat, sizes.width, args.seed)
    held = fit.pack(data.held, sizes.width, args.seed)
    run.log["packed"] = {"rows": len(rows), "width": sizes.width, "filled": round(float((rows.document >= 0).float().mean()), 4)}
    target = make_target(run, data, rows, held)
    if not args.only_reference:
        drafters = make_drafters(run, data, target)
        measure(run, data, target, drafters, held)
    if not args.skip_reference:
        reference(run, target, rows, held)
    print("RESULT " + json.dumps({k: run.log.get(k) for k in ("evaluation", "bars", "reference", "seconds")}), flush=True)
    return run.log


def new_model(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    """A Llama model with random weights on the device."""
    model: Any = LlamaForCausalLM(config)
    return model.to(device)


def make_target(run: Run, data: text.Corpus, rows: fit.PackedRows, held: fit.PackedRows) -> LlamaForCausalLM:
    """Train (or load) the target, round it to bfloat16, freeze and save it."""
    s = run.sizes
    target = new_model(llama_config(s.vocab, s.hidden, s.layers, s.heads, s.kv_heads, s.intermediate), run.device)
    result = None
    if run.args.target is None:
        plan = fit.Fit("target", run.args.steps, run.seconds(0.22), s.target_lr, checks=s.checks)
        result = fit.train_target(target, rows, held, s.batch, run.args.dropout, plan, run.args.seed)
        print(f"target passes over the data: {result.steps * s.batch / len(rows):.1f}", flush=True)
    else:
        data.tokenizer = text.Tokenizer.from_file(str(run.args.target / "tokenizer.json"))
        weights = {k: v for k, v in load_file(str(run.args.target / "model.safetensors")).items() if not k.startswith(f"model.layers.{s.layers}.")}
        missing = set(target.load_state_dict(weights, strict=False).missing_keys)
        assert missing == {"lm_head.weight"}, missing
        if run.args.previous_log is not None:
            run.log["target"] = json.loads(run.args.previous_log.read_text(encoding="utf-8"))["target"]
    round_to_bf16(target)
    target.eval().requires_grad_(False)
    run.model("target", "target", "transformers Llama", target, result)
    run.log.setdefault("target", {})["held_out_loss"] = round(fit.held_out_loss(target, held, s.batch), 4)
    if result is not None:
        run.log["target"]["passes"] = round(result.steps * s.batch / len(rows), 2)
    export.save_llama(target, data.tokenizer, run.family / "target")
    run.save("target")
    return target


def make_drafters(run: Run, data: text.Corpus, target: LlamaForCausalLM) -> dict[str, nn.Module]:
    """Generate the target's own text, train every drafter on it and on the corpus, round and save each."""
    s, device, seed = run.sizes, run.device, run.args.seed
    own = on_policy_rows(target, [data.train[i] for i in data.heads], s.own_per_batch, s.own_width, s.own_prompts, seed)
    own_tokens = sum(map(len, own))
    run.log["own_text"] = {"rows": len(own), "tokens": own_tokens, "mean_length": round(own_tokens / len(own), 1)}
    print(f"own text {run.log['own_text']} at {time.time() - run.start:.0f}s", flush=True)
    data_mix = fit.Mixture(
        fit.RowPool(own, s.widths, s.budget, device, seed), fit.RowPool(data.train + data.chat, s.widths, s.budget, device, seed + 1), 0.7, seed
    )
    shape = export.shape_of(target, s.intermediate)
    counts = torch.bincount(torch.cat([torch.from_numpy(r) for r in own]).long(), minlength=s.vocab)
    ids = counts.topk(s.draft_vocab).indices.sort().values
    run.log["draft_vocab_coverage"] = round(float(counts[ids].sum() / counts.sum()), 4)
    print(f"draft vocabulary covers {run.log['draft_vocab_coverage']:.4f} of own text", flush=True)
    steps = run.args.draft_steps
    drafters: dict[str, nn.Module] = {}

    def stage(name: str, folder: str, layout: str, module: nn.Module, train: Callable[[], fit.FitResult], save: Callable[[], None]) -> None:
        try:
            result = train()
        except RuntimeError:  # out of memory or a loss gone to infinity costs one drafter, not the run
            run.fail(name)
            return
        round_to_bf16(module)
        module.eval().requires_grad_(False)
        drafters[name] = module
        save()
        run.model(name, folder, layout, module, result)
        run.save(name)

    def head_plan(name: str, share: float) -> fit.Fit:
        return fit.Fit(name, steps, run.seconds(share), 2e-3, 0.05, checks=s.checks)

    model = new_model(llama_config(s.vocab, *s.draft), device)
    stage("draft_model", "draft_model", "transformers Llama", model,
          lambda: fit.distil_model(model, target, data_mix, fit.Fit("draft_model", 2 * steps, run.seconds(0.08), 4e-3, 0.05, checks=s.checks)),
          lambda: export.save_llama(model, data.tokenizer, run.family / "draft_model"))  # fmt: skip
    eagle, eagle3, mtp = EagleHead(shape).to(device), Eagle3Head(shape, ids.cpu(), s.vocab).to(device), MtpHead(shape).to(device)
    for head in (eagle, eagle3, mtp):
        init_weights(head)
    stage("eagle", "eagle", "EAGLE-1", eagle, lambda: fit.train_head(eagle, target, data_mix, head_plan("eagle", 0.105)),
          lambda: export.save_head(eagle, target, run.family / "eagle"))  # fmt: skip
    stage("eagle3", "eagle3", "EAGLE-3", eagle3, lambda: fit.train_head(eagle3, target, data_mix, head_plan("eagle3", 0.105)),
          lambda: export.save_head(eagle3, target, run.family / "eagle3"))  # fmt: skip
    stage("mtp", "target", "DeepSeek-V3 MTP, in the target's file", mtp, lambda: fit.train_head(mtp, target, data_mix, head_plan("mtp", 0.105)),
          lambda: export.save_llama(target, data.tokenizer, run.family / "target", mtp))  # fmt: skip
    if not run.args.skip_dflash:
        block = DFlashHead(shape, 1, s.block_size, text.PAD).to(device)
        init_weights(block)
        stage("dflash", "dflash", "DFlash (z-lab)", block, lambda: fit.train_block(block, target, data_mix, head_plan("dflash", 0.05)),
              lambda: export.save_head(block, target, run.family / "dflash"))  # fmt: skip
    return drafters


def fresh(run: Run, target: LlamaForCausalLM, drafters: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Drafters of the same shapes with random weights: what acceptance is worth without training."""
    made: dict[str, nn.Module] = {}
    for name, module in drafters.items():
        if isinstance(module, LlamaForCausalLM):
            made[name] = new_model(module.config, run.device).eval()
            continue
        assert isinstance(module, Head | DFlashHead)
        new = Eagle3Head(module.shape, module.target_ids.cpu(), run.sizes.vocab) if isinstance(module, Eagle3Head) else type(module)(module.shape)
        init_weights(new)
        made[name] = new.to(run.device).eval()
    return made


def measure(run: Run, data: text.Corpus, target: LlamaForCausalLM, drafters: dict[str, nn.Module], held: fit.PackedRows) -> None:
    """Acceptance on held-out function heads and on the embedded prompts, text figures, random drafters, samples; then the bars."""
    s = run.sizes
    rows = [data.held[i] for i in data.held_heads if len(data.held[i]) > s.eval_prompt + 8]
    heads = [r[: s.eval_prompt].tolist() for r in rows[: s.eval_rows]]
    named = run.args.prompts.exists() and not run.args.tiny
    prompts = (
        ev.load_prompts(run.args.prompts, data.tokenizer)
        if named
        else [r[: s.eval_prompt].tolist() for r in rows[s.eval_rows : s.eval_rows + 32]] or heads
    )
    result: dict[str, Any] = {"num_steps": ev.STEPS, "topk": 1, "prompts_are_embedded": named, "held_out_heads": {}, "prompts": {}}
    for temperature in (0.0, 0.8):
        key = f"T{temperature:g}"
        result["held_out_heads"][key] = ev.acceptance(target, drafters, heads, s.eval_tokens, temperature, run.args.seed)
        result["prompts"][key] = ev.acceptance(target, drafters, prompts, s.eval_tokens, temperature, run.args.seed)
    result["random_drafters"] = ev.acceptance(target, fresh(run, target, drafters), heads, s.eval_tokens, 0.0)
    result["samples"] = ev.samples(target, data.tokenizer, heads[:2] + prompts[:2], s.eval_tokens)
    run.log["evaluation"] = result
    run.log["bars"] = bars(result)
    for key in ("T0", "T0.8"):
        print(f"[evaluate] {key} " + json.dumps({n: d["mean_length"] for n, d in result["held_out_heads"][key]["drafters"].items()}), flush=True)
    run.save("evaluation")


def bars(result: dict[str, Any]) -> dict[str, Any]:
    """Each demand on the family as [figure, demand, met]."""
    at = {t: {n: d["mean_length"] for n, d in result["held_out_heads"][t]["drafters"].items()} for t in ("T0", "T0.8")}
    checks: dict[str, Any] = {}
    for name, floor in (("eagle", 2.4), ("eagle3", 2.4), ("mtp", 2.4), ("draft_model", 2.2)):
        if name not in at["T0"]:
            checks[name] = [None, "trained", False]
            continue
        for key, value, least in (
            ("T0", at["T0"][name], floor),
            ("over_ngram", at["T0"][name] - at["T0"]["ngram"], 0.4),
            ("T0.8", at["T0.8"][name], 1.7),
        ):
            checks[f"{name}.{key}"] = [round(value, 4), f">= {least}", value >= least]
    for name, entry in result["random_drafters"]["drafters"].items():
        if name != "ngram":
            checks[f"random.{name}"] = [entry["mean_length"], "< 1.1", entry["mean_length"] < 1.1]
    repeated = result["prompts"]["T0.8"]["repeated_4grams"]
    checks["repeated_4grams.T0.8"] = [repeated, "<= 0.2", repeated <= 0.2]
    return checks


def reference(run: Run, target: LlamaForCausalLM, rows: fit.PackedRows, held: fit.PackedRows) -> None:
    """Train the stock-trainer reference on the target's own batches and enter the ratio of held-out losses."""
    s, steps = run.sizes, run.log["target"].get("steps", run.args.steps)
    order = fit.step_rows(len(rows), s.batch, steps, run.args.seed)
    try:
        result = train_reference(target.config, rows, held, order, s.target_lr, run.device, run.start + run.seconds(1.0), s.checks)
    except Exception as error:  # the reference is a yardstick: its failure is reported and costs nothing else
        run.fail("reference")
        run.log["reference"] = {"error": str(error)}
        run.save("reference")
        return
    ours = run.log["target"]["held_out_loss"]
    run.log["reference"] = result | {"ours": ours, "ratio": round(ours / result["held_out_loss"], 4)}
    run.log.setdefault("bars", {})["loss_ratio"] = [run.log["reference"]["ratio"], "<= 1.05", run.log["reference"]["ratio"] <= 1.05]
    run.save("reference")


if __name__ == "__main__":
    sys.exit(1 if main().get("failures") else 0)
