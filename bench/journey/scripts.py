"""The training scripts of ``tests/data/scripts``, and each with the line that makes it hybrid."""

from __future__ import annotations

import difflib
from pathlib import Path

import attrs

SCRIPTS = Path(__file__).parents[2] / "tests" / "data" / "scripts"
IMPORT = "import qsync_torch as qsync"


@attrs.frozen
class Script:
    """A plain script, and how it becomes hybrid.

    Attributes:
        name: of the file.
        after_import: the import below which QSync's is added.
        after: the line below which the line is added.
        line: the line.
        wrapper: the line below it, with DistributedDataParallel, and the same with what the plan says of communication; none where
            the wrapper stands elsewhere.
    """

    name: str
    after_import: str
    after: str
    line: str
    wrapper: tuple[str, str] | None = None

    @property
    def plain(self) -> str:
        """The text of the file."""
        return (SCRIPTS / self.name).read_text()

    @property
    def hybrid(self) -> str:
        """The text with the line."""
        text = self.plain
        for place, line in ((self.after_import, IMPORT), (self.after, self.line)):
            [before] = [found for found in text.splitlines() if found.strip() == place]
            indent = before[: len(before) - len(place)]
            text = text.replace(f"{before}\n", f"{before}\n{indent}{line}\n")
        return text if self.wrapper is None else text.replace(*self.wrapper)

    def edits(self) -> int:
        """Places in which the scripts differ, the import aside: lines one below the other are one."""
        old, new = self.plain.splitlines(), self.hybrid.replace(f"{IMPORT}\n", "").splitlines()
        return sum(tag != "equal" for tag, *_ in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes())

    def added(self) -> list[str]:
        """Lines that ``diff`` shows as added to the plain script; those that it shows as taken away with a minus."""
        lines = difflib.ndiff(self.plain.splitlines(), self.hybrid.splitlines())
        return [line[2:].strip() if line[0] == "+" else line for line in lines if line[0] in "+-"]


ALL = (
    Script(
        "image_classification.py",
        "from torch import nn",
        "lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[1])",
        "qsync.hybrid(model, optimizer, criterion, data_loader)",
    ),
    Script(
        "fine_tune_bert.py",
        "from transformers import BertConfig, BertForSequenceClassification, get_scheduler, set_seed",
        'lr_scheduler = get_scheduler("linear", optimizer, args.num_warmup_steps, args.max_train_steps)',
        "qsync.hybrid(model, optimizer, None, train_dataloader)",
    ),
    Script(
        "autoencoder.py",
        "from torch.utils.data import DataLoader, Dataset",
        "loader = DataLoader(Waves(), cfg.batch_size, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True)",
        "qsync.hybrid(model, optimizer, loss_fn, loader)",
    ),
)

STYLES = (
    Script(
        "plain_loop.py",
        "from torch.utils.data.distributed import DistributedSampler",
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)",
        "applied = qsync.hybrid(net, optimizer, criterion, loader, accumulate=ACCUMULATE)",
        ("model = DDP(net)", "model = DDP(net, **applied.ddp_options())"),
    ),
    Script(
        "trainer_class.py",
        "from torch.utils.data import DataLoader, Dataset, DistributedSampler",
        "loader = DataLoader(dataset, args.batch_size, sampler=DistributedSampler(dataset), drop_last=True)",
        "qsync.hybrid(model, optimizer, sequence_loss, loader)",
    ),
    Script(
        "functions.py",
        "import torch.distributed as dist",
        "data = functools.partial(batches, dist.get_rank(), 128, steps)",
        "qsync.hybrid(model, optimizer, loss_fn, data)",
    ),
)
"""Of other styles than :data:`ALL`."""
