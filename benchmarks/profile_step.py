"""Which kernels a decode step runs and what each costs: a profiler trace of steady steps, summed by kernel name.

``python -m benchmarks.profile_step --job eagle3_s3 --batch 1``. Boundary: reads the trace; changes nothing. The last lines give the idle time between
two steps, the device time of a step, the time its kernels take, and the idle share between them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.options import Parser
from benchmarks.steps import JOBS, SHAPES, build_engine, random_requests
from specgen.config import ModelConfig
from specgen.models.loader import load_target


def kernel_events(trace: Any) -> list[Any]:
    """Device kernels and copies of a trace in start order."""
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(events, key=lambda e: e.time_range.start)


def between_steps(events: list[Any]) -> float:
    """Median microseconds from the end of a step's last kernel or copy to the start of the next step's first (``_begin``): the device without a
    graph to run."""
    gaps = [max(0.0, b.time_range.start - a.time_range.end) for a, b in pairwise(events) if b.name == "_begin"]
    return median(gaps) if gaps else 0.0


def summarise(events: list[Any], steps: int, top: int) -> None:
    """Print the most expensive kernels and the idle share."""
    total, count = defaultdict(float), defaultdict(int)
    busy, end = 0.0, 0.0
    for event in events:
        span = event.time_range
        total[event.name] += span.elapsed_us()
        count[event.name] += 1
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    wall = end - events[0].time_range.start
    between = between_steps(events)
    for name, micros in sorted(total.items(), key=lambda item: -item[1])[:top]:
        print(f"{micros / steps:9.1f} us {count[name] / steps:7.1f} x {micros / count[name]:7.2f}  {name[:110]}")
    print(f"idle before a step's first kernel: {between:.2f} us, {100 * between * steps / wall:.2f}% of a step")
    print(f"step {wall / steps:.1f} us, busy {busy / steps:.1f} us, idle {100 * (1 - busy / wall):.1f}%, kernels {len(events) / steps:.0f}")


def main(arguments: list[str] | None = None) -> None:
    """Profile the given jobs."""
    parser = Parser("python -m benchmarks.profile_step", __doc__)
    parser.add_argument("--job", default="eagle3_s3", choices=list(JOBS))
    parser.add_argument("--batch", default="1")
    parser.add_argument("--top", type=int, default=24)
    options = parser.parse_args(arguments)
    model = ModelConfig(source="hf", path=str(SHAPES / "llama31_8b"), dtype="bfloat16", device="cuda", load_format="dummy", max_length=1024)
    target = load_target(model, "cuda:0", torch.bfloat16)
    for batch in map(int, options.batch.split(",")):
        engine = build_engine(target, model, options.job, batch)
        for request in random_requests(batch, 200, 128):
            engine.add(request)
        for _ in range(12):
            engine.step()
        torch.cuda.synchronize()
        steps = 10
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(steps):
                engine.step()
            torch.cuda.synchronize()
        print(f"== {options.job} batch {batch}")
        summarise(kernel_events(trace), steps, options.top)
        engine.close()


if __name__ == "__main__":
    main()
