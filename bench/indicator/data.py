"""What the small models learn from: Python's own source text, and scikit-learn's handwritten digits.  Nothing is downloaded.

A batch depends on its step, its size and the seed alone.  The end of the data is held out.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from qsync_torch.job import Batch

BYTES = 128
"""Tokens: ASCII; other bytes of the source become '?'."""
FILES = (
    "argparse.py", "ast.py", "datetime.py", "decimal.py", "difflib.py", "doctest.py", "inspect.py", "locale.py", "mailbox.py",
    "optparse.py", "pdb.py", "pickle.py", "platform.py", "shutil.py", "subprocess.py", "tarfile.py", "threading.py", "turtle.py",
    "typing.py", "zipfile.py",
)  # fmt: skip
"""Of the standard library; those that this version of Python lacks are passed over."""
HELD_OUT_SHARE = 10
SIDE = 16
"""Digits of 8×8 are enlarged to this."""
SHIFT = 2
"""A training image is moved by up to so many pixels, so that a few hundred updates do not learn the 1,437 images by heart."""


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """Training and held-out tokens, 1-d int64."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join((folder / name).read_bytes() for name in FILES if (folder / name).is_file())
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    tokens = torch.where(tokens < BYTES, tokens, ord("?"))
    split = len(tokens) - len(tokens) // HELD_OUT_SHARE
    return tokens[:split], tokens[split:]


def _windows(text: Tensor, starts: Tensor, length: int) -> Batch:
    """Sequences of ``length`` tokens, (N, length), and as targets the tokens that follow each."""
    rows = text[starts[:, None] + torch.arange(length + 1)]
    return Batch((rows[:, :-1].contiguous(),), target=rows[:, 1:].contiguous())


def text_batch(step: int, size: int, *, length: int, seed: int) -> Batch:
    """Windows at random places of the source text."""
    text, _ = _text()
    starts = torch.randint(len(text) - length, (size,), generator=_generator(seed, step))
    return _windows(text, starts, length)


def held_out_text(length: int, windows: int = 256) -> Batch:
    """The same windows in every call, evenly spread over text that is not trained on."""
    _, text = _text()
    return _windows(text, torch.linspace(0, len(text) - length - 1, windows).long(), length)


@functools.cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (N, 1, 16, 16) of zero mean and unit variance and their labels, held-out ones and theirs."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    x = nn.functional.interpolate(x, size=(SIDE, SIDE), mode="bilinear")
    x = (x - x.mean()) / x.std()
    y = torch.tensor(labels, dtype=torch.int64)
    split = len(x) - len(x) // 5
    return x[:split], y[:split], x[split:], y[split:]


def digits_batch(step: int, size: int, *, seed: int) -> Batch:
    """Training images drawn at random, each moved by up to SHIFT pixels in both directions."""
    x, y, _, _ = _digits()
    generator = _generator(seed, step)
    chosen = torch.randint(len(x), (size,), generator=generator)
    padded = nn.functional.pad(x[chosen], [SHIFT] * 4, mode="replicate")
    down, right = torch.randint(2 * SHIFT + 1, (2, size), generator=generator)
    rows, columns = down[:, None] + torch.arange(SIDE), right[:, None] + torch.arange(SIDE)
    moved = padded[torch.arange(size)[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
    return Batch((moved[:, None],), target=y[chosen])


def held_out_digits() -> Batch:
    """All images that are not trained on, where they were."""
    _, _, x, y = _digits()
    return Batch((x,), target=y)


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
