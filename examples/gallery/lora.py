"""LoRA adapters on a frozen transformer, by peft: only the adapters train, and only they are synchronised.

torchrun --nproc-per-node 2 -m qsync prepare lora.py -o run
torchrun --nproc-per-node 2 lora.py
"""

import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import qsync_torch as qsync

EPOCHS = int(os.environ.get("EPOCHS", "1"))


class Classifier(nn.Module):
    """A vision transformer with adapters; images to logits."""

    def __init__(self):
        super().__init__()
        config = ViTConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=2,
            num_channels=1, num_labels=10,
        )  # fmt: skip
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
        self.vit = get_peft_model(ViTForImageClassification(config), adapters)

    def forward(self, images):
        return self.vit(pixel_values=images).logits


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels))
    loader = DataLoader(data, 16, sampler=DistributedSampler(data, drop_last=True), drop_last=True)

    torch.manual_seed(0)
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    applied = qsync.hybrid(model, optimizer, criterion, loader)
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = criterion(ddp(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
