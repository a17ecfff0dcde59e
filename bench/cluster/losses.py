"""Rows C5 and C5b: ordinary losses and model families, traced or rightly refused.

    python bench/cluster/losses.py [--out FOLDER] [--only NAME,...]

C5 traces a job with each loss, compares the model's operators with those of the same model under a loss that exports, profiles it
and observes it.  C5b builds each family from a tiny configuration (nothing is downloaded).  A family that is traced is right where
the graph has each call of a Linear or Conv2d that hooks count in eager steps; one that is refused is right where the sentence names
the code that decides, as the table in ``model_families.py`` has it, with what to do.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.model_families import FAMILIES, Family, job_of
from qsync_core.errors import QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.job import Job
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace
from results import parser_of, write_rows

_SAMPLES, _CLASSES = 6, 8
_ONCE = Effort(min_repeats=1, max_repeats=1, warmup=0, budget_s=0.01)
_SEEDS = 8
"""Eager steps of a family: LayerDrop leaves layers out of some."""


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.b(self.a(x).relu())
        return logits


def _ohem(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(o, t, reduction="none")
    return each[each > each.detach().median()].mean()


def _supervised_contrastive(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z = F.normalize(o, dim=1)
    same = (t[:, None] == t[None]) & ~torch.eye(len(t), dtype=torch.bool)
    return -((z @ z.t() / 0.1).log_softmax(1) * same).sum() / same.sum().clamp(min=1)


def _hungarian(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    from scipy.optimize import linear_sum_assignment

    wanted = F.one_hot(t, _CLASSES).float()
    i, j = linear_sum_assignment(torch.cdist(o.detach(), wanted).numpy())
    return F.mse_loss(o[torch.as_tensor(i)], wanted[torch.as_tensor(j)])


def _guarded(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(o, t)
    if torch.isnan(loss):
        raise RuntimeError("the loss is NaN")
    return loss


def _logged(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(o, t)
    loss.item()
    return loss


def _losses() -> dict[str, tuple[Callable[..., Any], torch.Tensor]]:
    y = torch.randint(_CLASSES, (_SAMPLES,))
    chosen, counts = torch.rand(_SAMPLES, _CLASSES) > 0.5, torch.rand(_SAMPLES, _CLASSES)
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(_CLASSES, _CLASSES, [4])

    def masked(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(o.masked_select(t), torch.ones(1).expand(int(t.sum())))

    def ctc(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(o[:, None].log_softmax(-1), t[None, :2] + 1, (_SAMPLES,), (2,))

    def by_counts(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(o, t, weight=1 / (torch.bincount(t, minlength=_CLASSES) + 1).float())

    return {
        "cross entropy of logits[mask]": (lambda o, t: F.cross_entropy(o[t != 3], t[t != 3]), y),
        "nonzero": (lambda o, t: F.cross_entropy(o[(t != 3).nonzero()[:, 0]], t[(t != 3).nonzero()[:, 0]]), y),
        "masked_select": (masked, chosen),
        "hard examples by a boolean mask": (_ohem, y),
        "topk": (lambda o, t: F.cross_entropy(o, t, reduction="none").topk(3)[0].mean(), y),
        "supervised contrastive": (_supervised_contrastive, y),
        "Hungarian matching": (_hungarian, y),
        "isnan guard": (_guarded, y),
        "loss.item() logged": (_logged, y),
        "Gaussian NLL": (lambda o, t: F.gaussian_nll_loss(o[:, 0], t.float(), F.softplus(o[:, 1])), y),
        "Poisson NLL": (nn.PoissonNLLLoss(), counts),
        "triplet": (lambda o, t: F.triplet_margin_loss(o[:2], o[2:4], o[4:]), y),
        "multi-margin": (nn.MultiMarginLoss(), y),
        "multilabel margin": (nn.MultiLabelMarginLoss(), torch.randint(-1, _CLASSES, (_SAMPLES, _CLASSES))),
        "cosine embedding": (lambda o, t: F.cosine_embedding_loss(o, o.roll(1, 0), t), torch.randint(2, (_SAMPLES,)) * 2 - 1),
        "adaptive log-softmax": (lambda o, t: adaptive(o, t).loss, y),
        "CTC": (ctc, y % 7),
        "weights by class count": (by_counts, y),
        "unique classes": (lambda o, t: sum(o[t == c].mean() for c in t.unique()), y),
    }


def measure_losses() -> dict[str, str]:
    """What is wrong with each of the 19 losses; empty where it was traced, measured and observed."""
    found = {}
    for name, (loss, target) in _losses().items():
        job = job_of(Model(), (torch.randn(_SAMPLES, 16), target), loss)
        try:
            found[name] = _fault_of(job)
        except Exception as error:  # anything at all counts against the row
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        print(f"{name:32s} {found[name] or 'traced, measured, observed'}", flush=True)
    return found


def _fault_of(job: Job) -> str:
    dag = trace(job)
    plain = trace(attrs.evolve(job, loss=lambda output, batch: output.square().mean()))
    if dag.adjustable != plain.adjustable or dag.buckets != plain.buckets:
        return "the model's operators or buckets are not those under a loss that is exported"
    measured = profile(job, dag, ProfileRequest(with_collectives=False, efforts=Efforts(_ONCE, _ONCE, _ONCE)))
    unmeasured = [
        operator.op_id for operator in dag.operators if operator.kind != "input" and operator.op_id not in measured.cost_index
    ]
    if unmeasured:
        return f"no cost of {unmeasured[0]}"
    observed = observe(job, dag, ObserveRequest([Variant.plain(Precision.BFLOAT16)], warmup=1, steps=1))
    return "" if observed.iterations else "nothing was observed"


def measure_families(names: list[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """Families that were traced, those that were refused, and what is wrong with any."""
    traced, refused, wrong = [], [], {}
    for name in names:
        fault, said, was_traced = _family(FAMILIES[name])
        (traced if was_traced else refused).append(name)
        if fault:
            wrong[name] = fault
        print(f"{name:28s} {'WRONG: ' + fault + ' ' if fault else ''}{'traced' if was_traced else said}", flush=True)
    return traced, refused, wrong


def _family(family: Family) -> tuple[str, str, bool]:
    torch.manual_seed(0)
    try:
        job = family.make()
        dag = trace(job)
    except QSyncError as error:
        return _fault_of_sentence(str(error), family), str(error), False
    except Exception as error:
        return f"{type(error).__name__} instead of a sentence", str(error), False
    if family.refused:
        return "", "", True  # better than the table
    return _fault_of_graph(job, dag), "", True


def _fault_of_sentence(said: str, family: Family) -> str:
    if not family.refused:
        return "refused, and should be traced"
    if family.refused not in said:
        return f"does not name {family.refused!r}"
    if family.advice not in said:
        return f"does not say {family.advice!r}"
    place = re.search(r"because of ([^ ]+):(\d+) \((.*?)\): ", said)
    if place is not None and Path(place[1]).read_text().splitlines()[int(place[2]) - 1].strip() != place[3]:
        return f"line {place[2]} of {place[1]} is not what it says"
    return ""


def _fault_of_graph(job: Job, dag: PrecisionDag) -> str:
    """Calls of Linear and Conv2d in eager steps against the graph's."""
    names = {module: name for name, module in job.model.named_modules() if type(module) in (nn.Linear, nn.Conv2d)}
    most: Counter[str] = Counter()
    for seed in range(_SEEDS):
        calls: Counter[str] = Counter()
        handles = [module.register_forward_hook(lambda module, *_: calls.update([names[module]])) for module in names]  # noqa: B023
        torch.manual_seed(seed)
        job.compute_loss(job.batch(0, job.batch_size))
        for handle in handles:
            handle.remove()
        most |= calls
    inside = Counter(operator.op_id.fqn for operator in dag.operators if operator.op_id.fqn in most)
    missing = most - inside
    return f"{next(iter(missing))} runs {most[next(iter(missing))]} times and is traced less often" if missing else ""


def main() -> None:
    """Measure and write both rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, comma-separated")
    options = parser.parse_args()
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    losses = measure_losses()
    failed = {name: fault for name, fault in losses.items() if fault}
    traced, refused, wrong = measure_families(options.only.split(","))
    rows = [
        {
            "id": "C5",
            "what": "ordinary losses whose job is traced, profiled and observed" + _told(failed),
            "value": len(losses) - len(failed),
            "unit": f"of {len(losses)}",
            "target": f"{len(losses)}",
        },
        {
            "id": "C5b",
            "what": f"wrong sentences, or graphs that lack a call, over {len(traced) + len(refused)} model families" + _told(wrong),
            "value": len(wrong),
            "unit": "families",
            "spread": f"traced: {', '.join(traced)}; refused: {', '.join(refused) or 'none'}",
            "target": "0",
        },
    ]
    print(write_rows("cluster", rows, "python bench/cluster/losses.py", directory=options.out))


def _told(faults: dict[str, str]) -> str:
    return "".join(f"; {name}: {fault}" for name, fault in faults.items())


if __name__ == "__main__":
    main()
