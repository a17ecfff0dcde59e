"""A causal language model on the text of Python's library, compiled, under bfloat16 autocast, two micro-batches a step.

torchrun --nproc-per-node 2 -m qsync prepare causal_lm.py -o run
torchrun --nproc-per-node 2 causal_lm.py
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import qsync_torch as qsync

STEPS = int(os.environ.get("STEPS", "20"))
BATCH, LENGTH, ACCUMULATE = 4, 64, 2


def batches(rank):
    """Samples of the library's bytes, without end; of each rank other ones."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    source, order = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(rank)
    while True:
        begins = torch.randint(len(source) - LENGTH - 1, (BATCH,), generator=order).tolist()
        tokens = torch.stack([source[begin : begin + LENGTH + 1] for begin in begins]).long()
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(output, targets):
    return functional.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    applied = qsync.hybrid(model, optimizer, loss_of, lambda: batches(dist.get_rank()), amp="bfloat16", accumulate=ACCUMULATE)
    ddp = torch.compile(DistributedDataParallel(model, **applied.ddp_options()))
    source = batches(dist.get_rank())
    for step in range(STEPS):
        for micro_batch in range(ACCUMULATE):
            inputs, targets = (tensor.to(device) for tensor in next(source))
            ddp.require_backward_grad_sync = micro_batch == ACCUMULATE - 1
            with torch.autocast(device.type, torch.bfloat16):
                output = ddp(inputs)
            loss = loss_of(output, targets)
            (loss / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
