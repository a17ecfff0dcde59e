"""Two ranks with unequal parts of one batch: DDP's gradient must be that of the whole batch.  Started by torchrun."""

import copy
import gc

import torch
import torch.distributed as dist

from qsync_torch.demo.messages import GROUPS, Method
from qsync_torch.demo.training import _Trainee
from qsync_torch.demo.workloads import Workload
from qsync_torch.job import Batch

SIZES = (7, 3)

dist.init_process_group("gloo")
torch.manual_seed(0)
x, y = torch.randn(10, 5), torch.randn(10, 2)
model = torch.nn.Linear(5, 2)
workload = Workload(
    name="linear",
    data="",
    model=model,
    samples=10,
    take=lambda rows, step: Batch((x[rows],), target=y[rows]),
    loss=lambda output, batch: torch.nn.functional.mse_loss(output, batch.target),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    batch_size=5,
    evaluate_once=None,
)
trainee = _Trainee(workload, Method("dynamic-batch", "", dict(zip(GROUPS, SIZES, strict=True))), dist.get_rank(), {}, 1)
trainee.step(trainee.batch(0))

reference = copy.deepcopy(model).double()
torch.nn.functional.mse_loss(reference(x.double()), y.double()).backward()
for name, parameter in reference.named_parameters():
    stepped = parameter.detach() - parameter.grad
    torch.testing.assert_close(trainee.model.get_parameter(name).detach().double(), stepped, rtol=1e-5, atol=1e-6)
del trainee
gc.collect()
dist.destroy_process_group()
