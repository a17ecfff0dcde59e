"""Training scripts as people write them, for tests to run up to their line."""

from __future__ import annotations

import textwrap
from pathlib import Path

PLAIN = """
    import argparse

    import torch
    from torch import nn

    import qsync_torch as qsync
    from beside import WIDTH

    SCALE = 2.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.fc(x) * SCALE

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float, default=0.1)
        parser.add_argument("--batch-size", type=int, default=4)
        parser.add_argument("--workers", type=int, default=0)
        parser.add_argument("--fail", default="")
        args = parser.parse_args()
        print("the script says something")
        if args.fail == "raise":
            raise ValueError("no such data")
        if args.fail == "exit":
            raise SystemExit(3)
        if args.fail == "end":
            return
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        data = torch.utils.data.TensorDataset(torch.randn(40, WIDTH), torch.arange(40) % 3)
        loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True, num_workers=args.workers)
        try:
            qsync.hybrid(model, optimizer, nn.CrossEntropyLoss(), loader)
            print("beyond the line")
        except Exception:
            print("an error of training")
        finally:
            with open("finally.txt", "w") as file:
                file.write("cleaned up")

    if __name__ == "__main__":
        main()
"""


def write(folder: Path, text: str = PLAIN, name: str = "train.py") -> Path:
    """A script in a folder, and the module beside it that it imports."""
    (folder / "beside.py").write_text("WIDTH = 5\n")
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path
