"""The yardstick for the target's training: the stock ``transformers.Trainer`` on the same model size, rows, batch and number of steps.

Boundary: uses transformers' Trainer as it comes (AdamW, cosine schedule, no dropout); needs the ``accelerate`` package. Knows nothing of drafters.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specgen.embedded.fit import PackedRows, document_mask, held_out_loss, next_token_labels


class _Rows(torch.utils.data.Dataset[int]):
    """Row numbers; the collator gathers the rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def train_reference(
    config: LlamaConfig, rows: PackedRows, held: PackedRows, order: Tensor, lr: float, device: torch.device, deadline: float, checks: int = 12
) -> dict[str, Any]:
    """Train a fresh model on exactly the batches ``order`` [steps, batch], in that order; returns steps, seconds, curve and the best held-out loss.

    ``deadline`` (time.time()) stops it early; the log then says ``stopped_early``. ImportError when accelerate is absent.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    steps, batch = order.shape
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    curve: list[list[Any]] = []
    start = time.time()
    tokens, document, positions = (x.to(device) for x in (rows.tokens, rows.document, rows.positions))

    def collate(chosen: list[int]) -> dict[str, Tensor]:
        index = torch.tensor(chosen, device=device)
        labels = next_token_labels(tokens[index], document[index])
        return {
            "input_ids": tokens[index].long(),
            "attention_mask": document_mask(document[index]),
            "position_ids": positions[index].long(),
            "labels": torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], 1),  # the model shifts labels by itself
        }

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step % max(1, steps // checks) == 0 or state.global_step == steps:
                curve.append([state.global_step, None, round(held_out_loss(kwargs["model"], held, batch), 4)])
                print(f"[reference] step {state.global_step}/{steps} held-out {curve[-1][2]:.4f} {time.time() - start:.0f}s", flush=True)
            if time.time() > deadline:
                control.should_training_stop = True
            return control

    class OrderedTrainer(Trainer):
        def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> Any:
            return order.flatten().tolist()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=lr,
            lr_scheduler_type="cosine",
            warmup_steps=min(100, max(1, steps // 5)),
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            logging_steps=max(1, steps // checks),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            seed=0,
        )
        trainer = OrderedTrainer(model=model, args=arguments, train_dataset=_Rows(len(rows)), data_collator=collate, callbacks=[Watch()])
        trainer.train()
        done = trainer.state.global_step
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    for entry in curve:
        entry[1] = losses.get(entry[0])
    final = round(held_out_loss(model, held, batch), 4)  # the Trainer has moved it to the device
    best = min([final, *[c[2] for c in curve]])
    return {
        "steps": done,
        "stopped_early": done < steps,
        "seconds": round(time.time() - start, 1),
        "held_out_loss": best,
        "final_loss": final,
        "curve": curve,
    }
