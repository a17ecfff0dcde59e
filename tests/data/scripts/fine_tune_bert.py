"""Fine-tuning a small BERT for sentiment without the Trainer; tokens and labels are made up so that nothing is downloaded."""

import argparse
import math
import os
import random

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import BertConfig, BertForSequenceClassification, get_scheduler, set_seed


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a transformers model on a text classification task")
    parser.add_argument("--max_length", type=int, default=32)
    parser.add_argument("--pad_to_max_length", action="store_true")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=1)
    parser.add_argument("--max_train_steps", type=int, default=20)
    parser.add_argument("--num_warmup_steps", type=int, default=5)
    parser.add_argument("--output_dir", type=str, default=None)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def make_examples(count, max_length, rng):
    """Sentences of 8 to max_length tokens; positive ones have more even tokens."""
    examples = []
    for _ in range(count):
        length = rng.randint(8, max_length)
        label = rng.randint(0, 1)
        ids = [2 * rng.randint(5, 90) + (rng.random() < (0.2 if label else 0.8)) for _ in range(length)]
        examples.append({"input_ids": ids, "labels": label})
    return examples


class Collator:
    def __init__(self, max_length=None):
        self.max_length = max_length

    def __call__(self, features):
        longest = self.max_length or max(len(f["input_ids"]) for f in features)
        batch = {"input_ids": [], "attention_mask": []}
        for f in features:
            missing = longest - len(f["input_ids"])
            batch["input_ids"].append(f["input_ids"] + [0] * missing)
            batch["attention_mask"].append([1] * len(f["input_ids"]) + [0] * missing)
        batch = {k: torch.tensor(v) for k, v in batch.items()}
        batch["labels"] = torch.tensor([f["labels"] for f in features])
        return batch


def main():
    args = parse_args()
    set_seed(args.seed)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if world_size > 1:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")

    config = BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = BertForSequenceClassification(config).to(device)

    train_dataset = make_examples(400, args.max_length, random.Random(args.seed))
    collator = Collator(args.max_length if args.pad_to_max_length else None)
    sampler = DistributedSampler(train_dataset) if world_size > 1 else None
    train_dataloader = DataLoader(
        train_dataset,
        shuffle=sampler is None,
        sampler=sampler,
        collate_fn=collator,
        batch_size=args.per_device_train_batch_size,
    )

    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = AdamW(optimizer_grouped_parameters, lr=args.learning_rate)
    lr_scheduler = get_scheduler("linear", optimizer, args.num_warmup_steps, args.max_train_steps)

    if world_size > 1:
        model = DDP(model, device_ids=[local_rank] if device.type == "cuda" else None)

    model.train()
    completed_steps, running = 0, 0.0
    num_epochs = math.ceil(args.max_train_steps / len(train_dataloader))
    for epoch in range(num_epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in train_dataloader:
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            completed_steps += 1
            running += loss.item()
            if completed_steps >= args.max_train_steps:
                break
    if local_rank == 0:
        print(f"{completed_steps} steps, mean loss {running / completed_steps:.4f}")
        if args.output_dir:
            (model.module if world_size > 1 else model).save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
