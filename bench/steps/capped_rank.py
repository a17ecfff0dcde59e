"""One rank of row L5: int8 on the second GPU within half of AMP's memory, then uniform float16 on both without that cap.

Uniform int8 with its inputs kept in int8 takes .53 of AMP's memory (row L4).  What is too much are activations of the first blocks:
the second rank computes as many of them again in its backward pass (``torch.utils.checkpoint``) as it takes.  Its first steps are
not capped: inductor tries its kernels in them, on copies of their operands.  Models are compiled as one graph each: cut at the
buckets of DistributedDataParallel, they would keep more.  Their forward and backward are replayed as CUDA graphs, for the CPU would
bind both sides; where the memory that graphs hold does not fit, the second rank's are issued by the CPU.

Started by ``gpu_steps.py``, once for each rank; the last rank is the weak one.  Rank 0 writes what was measured as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kernels.bench import Bench
from kernels.whole_model import Mode, WholeModel, release, time_in_turns
from steps.jobs import AMP, FUSED16, INT8, PLAIN16, RESNET, Contender, Steps, eight_bit
from steps.rows_memory import peak_bytes

RANK = int(os.environ["LOCAL_RANK"])
CAP = 0.5
WARM_UP = 5
PARTS = Mode.COMPILED_PARTS
LOW = tuple(Contender(eight_bit(INT8, fused=True, saved="int8"), mode) for mode in (PARTS, Mode.COMPILED))
FUSED = Contender(FUSED16, PARTS)
OTHERS = {"fused": FUSED, "plain": Contender(PLAIN16, PARTS)}
"""What the capped step is compared with."""
STAGES = ("layer1", "layer2")
"""Whose blocks may be computed again, the first of them first."""
TRIES = tuple((low, blocks) for low in LOW for blocks in (2, 3, 7))
"""With one block computed again, graphs hold 3.09 GiB of ResNet50 at a batch of 128, where half of AMP's memory is 2.84."""
PARALLEL = partial(DistributedDataParallel, gradient_as_bucket_view=True)
"""Gradients lie in the buckets, and not beside them."""


def again(model: nn.Module, blocks: int) -> nn.Module:
    """The model, which keeps of its first blocks only what goes into the first of each stage."""
    for name in STAGES:
        stage = model.get_submodule(name)
        parts = list(stage.children())
        count = min(blocks, len(parts))
        blocks -= count
        if count:
            stage.forward = partial(_first_again, nn.Sequential(*parts[:count]), nn.Sequential(*parts[count:]))
    return model


def _first_again(first: nn.Module, rest: nn.Module, x: torch.Tensor) -> Any:
    return rest(checkpoint(first, x, use_reentrant=False))


def forget() -> None:
    """Give the memory of finished models back, that of their graphs too, which inductor keeps for as long as Dynamo knows them."""
    torch._dynamo.reset()
    release()


def opened(steps: Steps, contender: Contender, blocks: int = 0) -> tuple[WholeModel, int]:
    """The job's model with this rank in that setting, after the steps in which DDP makes its buckets anew.

    Also how many graphs of all ranks inductor did not capture, but left to the CPU.
    """
    dist.barrier()
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    steps.bench.say(f"rank {RANK}: {contender.name}, {blocks} blocks computed again")
    model = steps.open(contender, wrap=lambda module: again(module, blocks), around=PARALLEL)
    for _ in range(WARM_UP):
        model.step()
    left = torch.tensor([torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] - skipped], device=steps.bench.device)
    dist.all_reduce(left)
    return model, int(left)


def blocks_ms(model: WholeModel, bench: Bench) -> list[float]:
    """Its step times."""
    count, each = (2, 1) if bench.quick else (7, 8)
    return list(time_in_turns({"": model.step}, bench.device, blocks=count, steps=each)[""].blocks_ms)


@contextmanager
def capped(cap: float | None, device: torch.device) -> Iterator[None]:
    """What this process allocates in the block stays within ``cap`` bytes; None: no cap."""
    release()
    if cap is None or device.type != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory, device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def fits(model: WholeModel, cap: float | None, bench: Bench) -> bool:
    """Whether every rank's forward and backward, which communicate nothing here, stay within its cap.

    Gradients lie beside the buckets here, and not in them: what fits so fits with 100 MiB to spare.
    """
    within = 1
    try:
        with capped(cap, bench.device):
            for _ in range(3):
                model.gradients()
            bench.say(f"rank {RANK}: reserves {reserved(bench.device) / 2**30:.3g} GiB")
            # Memory that graphs took before the cap raises no error under it.
            within = int(cap is None or reserved(bench.device) <= cap)
    except torch.OutOfMemoryError as error:
        bench.say(f"rank {RANK}: {error}")
        within = 0
    every = torch.tensor([within], device=bench.device)
    dist.all_reduce(every, dist.ReduceOp.MIN)
    return bool(every)


def reserved(device: torch.device) -> int:
    """Bytes at the highest point so far; 0 on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--untuned", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", RANK) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch._dynamo.config.optimize_ddp = False
    bench = Bench(device, quick=options.tiny)
    steps = Steps(bench, RESNET, tuned=not options.untuned)
    steps.prepare(LOW)
    amp = peak_bytes(steps, Contender(AMP, Mode.EAGER))
    # Ranks agree about nothing else here: each says for itself what its operators are.
    dist.init_process_group("nccl" if cuda else "gloo")
    found: dict[str, Any] = {"amp_bytes": amp, "cap_bytes": int(CAP * amp)}
    weak = dist.get_rank() == dist.get_world_size() - 1
    cap = CAP * amp if weak else None
    model: Any = None
    for low, blocks in TRIES:
        model = None
        forget()
        model, left = opened(steps, low, blocks) if weak else opened(steps, FUSED)
        if fits(model, cap, bench):
            break
    else:
        raise RuntimeError(f"int8 does not fit {CAP} of AMP's memory, with {blocks} blocks computed again either")
    with capped(cap, device):
        found |= {"capped_ms": blocks_ms(model, bench), "capped_left": left, "blocks": blocks, "mode": str(low.mode)}
        peak = torch.tensor([reserved(device) if weak else 0], device=device)
    dist.all_reduce(peak)
    found["weak_bytes"] = int(peak)
    for name, contender in OTHERS.items():
        model = None
        forget()
        model, left = opened(steps, contender)
        found |= {f"{name}_ms": blocks_ms(model, bench), f"{name}_left": left}
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
