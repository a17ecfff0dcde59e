"""One rank of row L5: uniform float16 on both GPUs, then int8 on the second one, which has half of AMP's memory from then on.

Uniform int8 with its inputs kept in int8 takes .61 of AMP's memory (row L4).  What is missing is activations of the first stage,
two fifths of them all: the second rank computes that stage again in its backward pass (``torch.utils.checkpoint``).

Started by ``gpu_steps.py``, once for each rank; the last rank is the weak one.  Rank 0 writes what was measured as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kernels.bench import Bench
from kernels.whole_model import Mode, release, time_in_turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from steps.jobs import AMP, FUSED16, INT8, PLAIN16, RESNET, Contender, Steps, eight_bit
from steps.rows_memory import peak_bytes

RANK = int(os.environ["LOCAL_RANK"])
CAP = 0.5
LOW = Contender(eight_bit(INT8, fused=True, saved="int8"), Mode.COMPILED)
PLAIN, FUSED = Contender(PLAIN16, Mode.COMPILED), Contender(FUSED16, Mode.COMPILED)


def first_stage_again(model: nn.Module) -> nn.Module:
    """The model, which keeps of its first stage only what goes in."""
    stage = model.get_submodule("layer1")
    forward = stage.forward
    stage.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    return model


def blocks_ms(steps: Steps, contender: Contender, *, keeps_less: bool = False) -> list[float]:
    """Step times of the whole job with this rank in that setting."""
    dist.barrier()
    steps.bench.say(f"rank {RANK}: {contender.name}")
    model = steps.open(contender, wrap=lambda module: DistributedDataParallel(first_stage_again(module) if keeps_less else module))
    count, each = (2, 1) if steps.bench.quick else (7, 8)
    found = time_in_turns({"": model.step}, steps.bench.device, blocks=count, steps=each)[""].blocks_ms
    del model
    release()
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", RANK) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    bench = Bench(device, quick=options.tiny)
    steps = Steps(bench, RESNET, tuned=False)
    steps.prepare([LOW])
    amp = peak_bytes(steps, Contender(AMP, Mode.EAGER))
    # Ranks agree about nothing else here: each says for itself what its operators are.
    dist.init_process_group("nccl" if cuda else "gloo")
    found: dict[str, Any] = {"amp_bytes": amp, "cap_bytes": int(CAP * amp)}
    found["fused_ms"] = blocks_ms(steps, FUSED)
    weak = dist.get_rank() == dist.get_world_size() - 1
    if weak and cuda:
        torch.cuda.set_per_process_memory_fraction(CAP * amp / torch.cuda.get_device_properties(device).total_memory, device)
        torch.cuda.reset_peak_memory_stats(device)
    found["capped_ms"] = blocks_ms(steps, LOW if weak else FUSED, keeps_less=weak)
    peak = torch.tensor([torch.cuda.max_memory_reserved(device) if weak and cuda else 0], device=device)
    dist.all_reduce(peak)
    found["weak_bytes"] = int(peak)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found))
    if weak and cuda:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    found["plain_ms"] = blocks_ms(steps, PLAIN)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
