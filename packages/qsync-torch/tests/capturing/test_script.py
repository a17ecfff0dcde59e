"""``job_of_script``: a script runs as ``python`` runs it, up to its line."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest
import torch

from qsync_core.errors import JobError
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Compiled, Compiler
from qsync_core.ir.variant import Variant
from qsync_torch.capturing.script import LINE, job_of_script, unsaid_autocast
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

from .scripts import PLAIN, write


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    sys.modules.pop("beside", None)


def test_the_script_runs_up_to_its_line_with_its_own_arguments(tmp_path, capfd):
    before = sys.argv, Path.cwd()
    said = job_of_script(write(tmp_path), ["--lr", "0.25", "--batch-size", "8"])
    job, caller = said.job, said.caller
    assert (sys.argv, Path.cwd()) == before
    assert (job.name, job.batch_size, job.amp) == ("Net", 8, None)
    assert caller.line(tmp_path / "run") == f"qsync.hybrid(..., run='{tmp_path}/run')"
    [group] = job.optimizer(job.model.parameters()).param_groups
    assert (group["lr"], group["momentum"]) == (0.25, 0.9)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("the script says something") == 1
    assert "beyond the line" not in said.err
    assert "an error of training" not in said.err
    assert (tmp_path / "finally.txt").read_text() == "cleaned up"
    # What the script defined still works after it has ended: classes, their globals, modules beside it.
    dag = trace(job)
    assert [str(operator.op_id) for operator in dag.adjustable] == ["fc#0"]
    assert job.compute_loss(job.batch(0, 8)).item() > 0


DEFINES_ITS_MODEL = """
    import torch
    import torch.nn.functional as F
    import qsync_torch as qsync

    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(32, 8)

        def forward(self, x):
            return F.relu(Sign.apply(self.fc(x)))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.arange(64) % 3)
    qsync.hybrid(model, optimizer, torch.nn.CrossEntropyLoss(), torch.utils.data.DataLoader(data, 32), compiles={compiles})
"""


def test_a_model_that_the_script_defines_is_compiled_at_every_rung(tmp_path):
    job = job_of_script(write(tmp_path, DEFINES_ITS_MODEL.format(compiles=True))).job
    assert job.compiles == Compiled(Compiler.TORCH)
    job = attrs.evolve(job, compiles=Compiled(backend="aot_eager"))  # quicker
    quick = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
    int8 = Variant.of(Precision.INT8)
    measured = profile(job, trace(job), ProfileRequest(ladder=[int8], efforts=Efforts(quick, quick, quick)))
    assert int8 in {step.variant for step in measured.steps}


def test_loaders_with_workers_are_read(tmp_path):
    path = write(tmp_path)
    alone, forked = (job_of_script(path, ["--workers", n]).job for n in "02")
    assert all(torch.equal(a, b) for a, b in zip(alone.batch(1, 4).tensors, forked.batch(1, 4).tensors, strict=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fail", "raise"], r"failed in line 29 of train\.py, before it reached qsync\.hybrid\(.*\): ValueError: no such data$"),
        (["--fail", "exit"], r"train\.py ended with exit status 3 in line 31 of train\.py, before it reached qsync\.hybrid\(.*\)$"),
        (["--lr", "many"], r"exit status 2 in line 26 of train\.py, before .*; the script's own arguments stand behind --$"),
        (["--fail", "end"], r"train\.py ended without saying what it trains: add the line qsync\.hybrid\(model, optimizer, loss_"),
    ],
)
def test_what_keeps_a_script_from_its_line_is_said_with_the_place(tmp_path, arguments, said):
    with pytest.raises(JobError, match=said):
        job_of_script(write(tmp_path), arguments)


TRAINS = """
    import torch
    {imports}

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        try:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        except Exception:
            pass
        open("trained.txt", "a").write("x")
"""


def test_a_script_that_says_nothing_of_the_line_does_not_run(tmp_path):
    with pytest.raises(JobError, match=r"train\.py does not say what it trains, nor does a module that it imports: add the"):
        job_of_script(write(tmp_path, TRAINS.format(imports="from beside import WIDTH")))
    assert not (tmp_path / "trained.txt").exists()


def test_a_script_that_trains_without_its_line_ends_at_the_first_step(tmp_path):
    path = write(tmp_path, TRAINS.format(imports="import qsync_torch as qsync  # qsync.hybrid is to come"))
    with pytest.raises(JobError, match=r"without having said what: its first optimizer step came in line 10 of train\.py, and"):
        job_of_script(path)
    assert not (tmp_path / "trained.txt").exists()
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.5).step()  # as ever again
    assert parameter.item() == 0.5


def test_what_is_no_python_has_its_own_place_alone(tmp_path):
    with pytest.raises(
        JobError, match=r"train\.py failed, before it reached .*: SyntaxError: invalid syntax \(train\.py, line 1\)"
    ):
        job_of_script(write(tmp_path, "def :"))


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(JobError, match=r"there is no file '.*absent\.py'"):
        job_of_script(tmp_path / "absent.py")


@pytest.mark.parametrize("ending", ["except: pass", "except BaseException: sys.exit(4)", "finally: undefined"])
def test_what_a_script_does_after_its_line_is_of_no_interest(tmp_path, ending):
    text = PLAIN.replace('        except Exception:\n            print("an error of training")\n', "").replace(
        '        finally:\n            with open("finally.txt", "w") as file:\n                file.write("cleaned up")\n',
        f"        {ending}\n",
    )
    assert ending in text
    assert job_of_script(write(tmp_path, "import sys\n" + text.replace("\n    ", "\n"))).job.name == "Net"


def test_what_the_line_refuses_is_said_as_it_is(tmp_path):
    text = PLAIN.replace("qsync.hybrid(model, optimizer,", "qsync.hybrid(model, 'sgd',").replace(
        "except Exception", "except KeyError"
    )
    with pytest.raises(JobError, match=r"^the optimizer of Net is a str; pass"):
        job_of_script(write(tmp_path, text))


def test_ranks_that_a_script_starts_by_itself_are_refused(tmp_path):
    text = """
        import torch
        import qsync_torch as qsync

        def rank(index):
            model = torch.nn.Linear(2, 2)
            qsync.hybrid(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, y: out.sum(), [(torch.ones(2, 2), 1)])

        if __name__ == "__main__":
            torch.multiprocessing.spawn(rank, nprocs=1)
    """
    with pytest.raises(JobError, match=r"failed.*JobError: qsync\.hybrid.* in a process that the script started by itself; "):
        job_of_script(write(tmp_path, text))


def test_a_wrapped_model_is_taken_out_or_refused(tmp_path):
    text = PLAIN.replace("qsync.hybrid(model,", "qsync.hybrid(torch.compile(model),").replace("except Exception", "except KeyError")
    with pytest.raises(JobError, match=r"qsync\.hybrid is wrapped in torch\.compile; call it on the model itself"):
        job_of_script(write(tmp_path, text))


@pytest.mark.parametrize(
    ("loop", "amp", "said"),
    [
        ("with torch.autocast('cpu'): pass", "", True),
        ("with torch.autocast('cpu'): pass", ", amp='bfloat16'", False),
        ("pass", "", False),
        ("'Without autocast(...), which is slower here.'", "", False),
    ],
)
def test_a_script_that_calls_autocast_and_does_not_say_so_is_told(tmp_path, loop, amp, said):
    text = PLAIN.replace('print("beyond the line")', loop).replace(", loader)\n", f", loader{amp})\n")
    path = write(tmp_path, text)
    note = unsaid_autocast(path, job_of_script(path).job)
    assert ("write qsync.hybrid(..., amp='bfloat16')" in note) == said


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("model = torch.compile(model)", Compiled()),
        ("model.compile()", Compiled()),
        ("qsync.compile(applied)", Compiled(Compiler.QSYNC)),
        ("ddp = DDP(torch.compile(model))", Compiled()),
        ("compiled = torch.compile(model); ddp = DDP(compiled)", Compiled()),
        ("ddp = DistributedDataParallel(model); ddp = qsync.compile(ddp)", Compiled(Compiler.QSYNC, around_ddp=True)),
        ("ddp = torch.compile(DDP(model))", Compiled(around_ddp=True)),
        ("pattern = re.compile('x')", None),
        ("pass  # torch.compile(model) is slower here", None),
        ("print('torch.compile(model) is slower here', f'{model}.compile()')", None),
        ("(lambda: torch.compile(model))", Compiled()),
    ],
)
def test_a_script_that_compiles_its_model_is_known(tmp_path, loop, said):
    path = write(tmp_path, PLAIN.replace('print("beyond the line")', loop))
    assert job_of_script(path).job.compiles == said


LOOP = """
for epoch in range(2):
    for x, y in loader:
        loss = model(x).sum()
        loss.backward()
        {0}
    print(loss.item())
"""


@pytest.mark.parametrize(
    "loop, reads",
    [
        (LOOP.format("total += loss.item()"), True),
        (LOOP.format("with torch.no_grad(): bar.set_postfix(loss=f'{loss.item():.3f}')"), True),
        (LOOP.format("if loss.item() > 10: break"), True),
        (LOOP.format("if step % 10 == 0: print(loss.item())"), False),
        (LOOP.format("total += loss.detach()"), False),
        (LOOP.format("show = lambda: loss.item()"), False),
        ("def step(batch):\n    loss = model(batch).sum()\n    loss.backward()\n    return loss.item()", True),
        ("def step(batch):\n    model(batch).sum().backward()\nfor batch in loader:\n    print(score(batch).item())", False),
    ],
)
def test_a_loop_that_reads_a_number_of_every_step_is_known(tmp_path, loop, reads):
    path = Path(write(tmp_path, PLAIN))
    path.write_text(f"{path.read_text()}\n{loop}\n")
    assert job_of_script(path).job.reads_loss is reads


OWN = {"gradient_as_bucket_view": False}
DEFAULTS = OWN | {"bucket_cap_mb": None, "broadcast_buffers": True, "static_graph": False}
WITHOUT_BROADCAST = {name: value for name, value in DEFAULTS.items() if name != "broadcast_buffers"}


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("ddp = DistributedDataParallel(model)", DEFAULTS),
        ("from torch.nn.parallel import DistributedDataParallel as Wrapped; ddp = Wrapped(model, device_ids=[0])", DEFAULTS),
        ("ddp = torch.nn.parallel.DistributedDataParallel(module=model, static_graph=True)", DEFAULTS | {"static_graph": True}),
        (
            "ddp = DDP(model, bucket_cap_mb=50, forward_sync_buffers=False)",
            DEFAULTS | {"bucket_cap_mb": 50, "broadcast_buffers": False},
        ),
        (
            "ddp = DDP(model, gradient_as_bucket_view=args.view)",
            {k: v for k, v in DEFAULTS.items() if k != "gradient_as_bucket_view"},
        ),
        ("ddp = DDP(model); other = DDP(model)", DEFAULTS),
        (
            "ddp = DDP(model, bucket_cap_mb=None, bucket_cap_mb_list=None, forward_sync_buffers=None, broadcast_buffers=None)",
            DEFAULTS,
        ),
        ("ddp = DDP(model, forward_sync_buffers=None, broadcast_buffers=False)", DEFAULTS | {"broadcast_buffers": False}),
        ("ddp = DDP(model, forward_sync_buffers=True, broadcast_buffers=False)", DEFAULTS),
        ("ddp = DDP(model, broadcast_buffers=False, forward_sync_buffers=True)", DEFAULTS),
        ("ddp = DDP(model, broadcast_buffers=a, forward_sync_buffers=True)", DEFAULTS),
        ("ddp = DDP(model, broadcast_buffers=a, forward_sync_buffers=b)", WITHOUT_BROADCAST),
        ("ddp = DDP(model, broadcast_buffers=False, forward_sync_buffers=b)", WITHOUT_BROADCAST),
        ("ddp = DDP(model, bucket_cap_mb_list=[1, 50])", {}),
        ("ddp = DDP(model, bucket_cap_mb_list=caps)", {}),
        ("ddp = DDP(model) if quick else DDP(model, static_graph=True)", {}),
        ("ddp = DDP(model, **applied.ddp_options())", {}),
        ("ddp = DDP(model, None, 0)", {}),
        ("ddp = DDP(*wrapped)", {}),
        ("ddp = DDP(model, bucket_cap_mb='large')", {}),
        ("ddp = DDP(model, bucket_cap_mb='25')", {}),
        ("ddp = DDP(model, bucket_cap_mb=True)", {}),
        ("ddp = DDP(model, bucket_cap_mb=-1)", {}),
        (f"ddp = DDP(model, bucket_cap_mb=1{'0' * 400})", {}),
        ("ddp = DDP(model, static_graph='yes')", {}),
        ("ddp = DDP(model, broadcast_buffers=[])", {}),
        ("ddp = wrapped_elsewhere(model)  # DDP(model)", {}),
    ],
)
def test_what_a_script_gives_its_wrapper_by_itself_is_known(tmp_path, loop, said):
    path = write(tmp_path, PLAIN.replace('print("beyond the line")', loop))
    assert job_of_script(path).job.communication == said


@pytest.mark.parametrize(
    ("loop", "says", "said"),
    [
        ("if args.compile: model = torch.compile(model)", "False", None),
        ("if args.compile: model = qsync.compile(model)", "True", Compiled(Compiler.QSYNC)),
        ("model = wrapped_elsewhere(model)", "True", Compiled()),
    ],
)
def test_the_line_says_whether_the_model_is_compiled(tmp_path, loop, says, said):
    text = PLAIN.replace('print("beyond the line")', loop).replace(", loader)\n", f", loader, compiles={says})\n")
    assert job_of_script(write(tmp_path, text)).job.compiles == said


def test_a_script_whose_other_rank_has_left_says_that_all_come_to_the_line(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import torch.distributed as dist\nraise dist.DistNetworkError('Connection reset. More')\n{LINE}\n")
    said = r"train\.py waited in line 2 of train\.py for a rank that has left, .* come to qsync\.hybrid\(.*Connection reset\)$"
    with pytest.raises(JobError, match=said):
        job_of_script(path)


def test_a_script_that_needs_torchrun_says_so(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.write_text(f"import torch.distributed as dist\ndist.init_process_group('gloo')\n{LINE}\n")
    said = r"failed in line 2 of train\.py, .* RANK expected, but not set; start its ranks with torchrun, as in 'torchrun "
    with pytest.raises(JobError, match=said):
        job_of_script(path)
