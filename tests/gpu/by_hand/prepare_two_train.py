"""An image script as users have them: ResNet50 of transformers, DistributedDataParallel, synthetic data; one added line."""

import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

import qsync_torch as qsync

SMALL = os.environ.get("TRY_CPU") == "1"  # a tiny model on CPU workers, to try the logic
STEPS, SKIPPED = 30, 10


def main() -> None:
    cuda = not SMALL
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    if SMALL:
        config = ResNetConfig(num_labels=10, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    else:
        config = ResNetConfig(num_labels=1000)  # ResNet50
    size, batch, images = (32, 16, 128) if SMALL else (224, 64, 512)
    model = ResNetForImageClassification(config).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    data = TensorDataset(torch.randn(images, 3, size, size), torch.randint(0, config.num_labels, (images,)))
    loader = DataLoader(data, batch, shuffle=True, drop_last=True, pin_memory=cuda)

    applied = qsync.hybrid(model, optimizer, criterion, loader, run=os.environ.get("RUN", "run"))  # the added line

    scalars: dict[str, float] = {}
    applied.log_scalars(lambda name, value, step: scalars.update({name: round(value, 2)}), every=1)
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    started = time.perf_counter()
    model.train()
    took, losses = [], []
    # 8 batches are read beforehand, so that reading is no part of a step.
    batches = [(x.to(device), y.to(device)) for x, y in loader]
    for step in range(STEPS):
        x, y = batches[step % len(batches)]
        if cuda and step == SKIPPED:
            torch.cuda.reset_peak_memory_stats()  # the first step's is cuDNN's search
        begun = time.perf_counter()
        loss = criterion(ddp(x).logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - begun))
        losses.append(loss.item())
    late = sorted(took[SKIPPED:])
    said = {
        "rank": dist.get_rank(),
        "ranks": dist.get_world_size(),
        "group": os.environ.get("QSYNC_GROUP"),
        "share": os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
        "sms": torch.cuda.get_device_properties(device).multi_processor_count if cuda else None,
        "predicted_ms": scalars.get("qsync/predicted_step_ms"),
        "step_ms": round(statistics.median(late), 2),
        "quartiles_ms": [round(late[len(late) // 4], 2), round(late[3 * len(late) // 4], 2)],
        "last_step": scalars,
        "first_steps_ms": [round(t, 1) for t in took[:3]],
        "loss": [round(losses[0], 4), round(losses[-1], 4)],
        "peak_mib": round(torch.cuda.max_memory_reserved() / 2**20) if cuda else None,
        "training_s": round(time.perf_counter() - started, 1),
    }
    print("STEP " + json.dumps(said), flush=True)
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
