"""Token classification with Accelerate: what kind of token each byte of a Python source belongs to, padded samples and a mask.

accelerate launch --num-processes 2 -m qsync prepare token_classification.py -o run
accelerate launch --num-processes 2 token_classification.py
"""

import os
import sysconfig
import tokenize
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification

import qsync_torch.integrations.accelerate as qsync

STEPS = int(os.environ.get("STEPS", "20"))
LENGTH, IGNORED = 64, -100
KINDS = [tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING, tokenize.COMMENT]


def samples(count=512):
    """Lines of the library as bytes, and for each byte the kind of its token: 0 for none."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        with path.open("rb") as source:
            lines = [line.encode() for line in path.read_text().splitlines()]
            kinds = [[0] * len(line) for line in lines]
            for token in tokenize.tokenize(source.readline):
                (row, begin), (last, end) = token.start, token.end
                if token.type in KINDS and row == last:
                    kinds[row - 1][begin:end] = [KINDS.index(token.type) + 1] * (end - begin)
        found += [
            (line[:LENGTH], of_line[:LENGTH]) for line, of_line in zip(lines, kinds, strict=True) if line.isascii() and line.strip()
        ]
        if len(found) >= count:
            return found[:count]
    return found


def collate(lines):
    """Pad to one length, with a mask."""
    batch = {name: torch.zeros(len(lines), LENGTH, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((len(lines), LENGTH), IGNORED)
    for row, (line, kinds) in enumerate(lines):
        batch["input_ids"][row, : len(line)] = torch.tensor(list(line))
        batch["attention_mask"][row, : len(line)] = 1
        batch["labels"][row, : len(line)] = torch.tensor(kinds)
    return batch


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_labels=len(KINDS) + 1
    )
    model = BertForTokenClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(), 8, shuffle=True, collate_fn=collate, drop_last=True)

    qsync.hybrid(accelerator, model, optimizer, None, loader)  # None: the model's output has the loss
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while done < STEPS:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % 5 == 0:
                accelerator.print(f"step {done}: loss {loss.item():.3f}")
            if done == STEPS:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
