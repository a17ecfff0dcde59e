"""``script.py`` with a loop that reads the loss of every step, as loops do that print it: its ranks wait for the device in each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from script import main


def train_step(loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    """One step of the loop, and its loss."""
    loss = loss_of()
    loss.backward()
    read = loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return read


if __name__ == "__main__":
    main(train_step)
