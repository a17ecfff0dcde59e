"""Load a checkpoint of ``train_ddp.py`` and test it: plain PyTorch, no QSync needed.

python evaluate.py checkpoint.pt
"""

from __future__ import annotations

import sys

import torch
from digits_net import accuracy, load_data, make_model


def main(path: str) -> None:
    model = make_model()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
    print(f"held-out accuracy {accuracy(model, load_data()[1]):.1%}")


if __name__ == "__main__":
    main(sys.argv[1])
