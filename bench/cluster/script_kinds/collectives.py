"""Ranks that communicate in the forward of a model, some of them in its backward too."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn

from .script import BATCH, WIDTH, Two, enter, other_rank, train

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.nn.functional as differentiable

Result = tuple[Any, ...]


def mean_of(parts: Any) -> torch.Tensor:
    """What is compared: in float32."""
    return torch.cat(list(parts)).float().mean(0)


@enter()
def gather(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    parts = [torch.zeros_like(h) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(h.detach(), parts, 0)
    return m.b(h), mean_of(parts or [h[:0], torch.zeros(1, WIDTH)])


@enter("bfloat16 float16 int8", "0 1 01")
def broadcast(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = h.detach().clone().contiguous()
    dist.broadcast(c, 1)
    return m.b(h), c.float().mean(0), c.float().amax()


@enter("bfloat16 float16 int8", "1 01")
def all_reduce(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = h.detach().mean(0)
    dist.all_reduce(c)
    m.seen = 0.9 * m.seen + 0.1 * c
    return m.b(h - c / 2), c


@enter()
def all_reduce_largest(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = h.detach().amax(0)
    dist.all_reduce(c, dist.ReduceOp.MAX)
    return m.b(h / c.abs().clamp(min=0.3)), c


@enter()
def all_reduce_asynchronously(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = h.detach().clone()
    work = dist.all_reduce(c, async_op=True)
    y = m.b(h)
    work.wait()
    return y - c.mean(), c


@enter()
def all_reduce_of_what_was_read(m: Two, x: torch.Tensor) -> Result:
    x = x * 1
    first = m.a(x)
    with torch.no_grad():
        dist.all_reduce(x)
    return first.detach() + m.b(x), x


@enter()
def all_reduce_through_an_alias(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x).detach()
    dist.all_reduce(h.detach())
    return m.b(h), h


@enter()
def all_reduce_coalesced(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c, d = h.detach().mean(0), h.detach().square().mean(0)
    with dist._coalescing_manager():
        dist.all_reduce(c)
        dist.all_reduce(d)
    return m.b((h - c / 2) / (d / 2).sqrt()), c, d


@enter()
def reduce(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = h.detach().clone()
    dist.reduce(c, 1)
    return m.b(h), c if dist.get_rank() == 1 else c[:0]


@enter("bfloat16 float16 int8", "1 01")
def all_gather(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    parts = [torch.zeros_like(h) for _ in range(2)]
    dist.all_gather(parts, h.detach())
    parts[dist.get_rank()] = h
    return m.b(torch.cat(parts)), mean_of(parts)


@enter()
def all_gather_into_parts(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    whole = torch.empty(2, *h.shape, dtype=h.dtype)
    dist.all_gather(list(whole.unbind()), h.detach())
    return m.b(h), whole.float().mean((0, 1)), whole[other_rank()].float().amax()


@enter()
def all_gather_into_parts_asynchronously(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    whole = torch.empty(2 * BATCH, WIDTH, dtype=h.dtype)
    work = dist.all_gather(list(whole.chunk(2)), h.detach(), async_op=True)
    y = m.b(h)
    work.wait()
    return y, whole.float().mean(0)


@enter("bfloat16 float16 int8")
def all_gather_single(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    whole = h.new_empty(2 * BATCH, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(whole, h.detach())
    return m.b(h), mean_of([whole])


@enter()
def reduce_scatter(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    out = torch.empty_like(h[:4])
    dist.reduce_scatter(out, list(h.detach().contiguous().chunk(2)))
    return m.b(h), out


@enter()
def reduce_scatter_single(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    out = torch.empty_like(h[:4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.reduce_scatter_tensor(out, h.detach().contiguous())
    return m.b(h), out


@enter()
def all_to_all_single(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    out = torch.empty_like(h)
    dist.all_to_all_single(out, h.detach().contiguous())
    return m.b(h), out


@enter()
def scatter(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x).detach()
    out = torch.empty_like(h[:4])
    dist.scatter(out, [part.contiguous() for part in h.chunk(2)] if dist.get_rank() == 1 else None, 1)
    return m.b(x), out


@enter("bfloat16 int8", "0 1")
def send_and_receive(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    got = torch.zeros_like(h)
    dist.send(h.detach().contiguous(), 1) if dist.get_rank() == 0 else dist.recv(got, 0)
    dist.send(h.detach().contiguous(), 0) if dist.get_rank() == 1 else dist.recv(got, 1)
    return m.b(h + got), got


@enter("bfloat16 int8", "0 1")
def send_and_receive_at_once(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    got = torch.zeros_like(h)
    operations = [dist.P2POp(dist.isend, h.detach().contiguous(), other_rank()), dist.P2POp(dist.irecv, got, other_rank())]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return m.b(h + got), got


@enter()
def objects(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"h": h.detach(), "size": len(h)})
    return m.b(h), mean_of([part["h"].float() for part in found])


@enter("bfloat16 float16 int8")
def sent_in_half(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    sent = torch.cat([h.detach().half(), h.detach().half()])
    parts = [torch.empty_like(sent) for _ in range(2)]
    dist.all_gather(parts, sent)
    return m.b(h), mean_of(parts)


@enter("bfloat16 int8")
def sent_in_bfloat16(m: Two, x: torch.Tensor) -> Result:
    sent = m.a(x).detach().bfloat16()
    dist.broadcast(sent, 0)
    return m.b(x), sent.float()


@enter("bfloat16 int8")
def sent_in_a_literal_format(m: Two, x: torch.Tensor) -> Result:
    sent = m.a(x).detach().to(torch.bfloat16)
    dist.all_reduce(sent)
    return m.b(x), sent.float()


@enter("bfloat16 int8", "0 1 01")
def functional_all_reduce(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = functional.all_reduce(h.detach(), "sum", dist.group.WORLD)
    return m.b(h - c.mean(0)), c * 1


@enter()
def functional_all_gather(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        c = functional.all_gather_tensor(h.detach(), 0, dist.group.WORLD)
    return m.b(h), mean_of([c * 1])


@enter()
def functional_reduce_scatter(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        c = functional.reduce_scatter_tensor(h.detach(), "sum", 0, dist.group.WORLD)
    return m.b(h), c * 1


@enter("bfloat16 int8", "1 01")
def functional_all_gather_with_gradients(m: Two, x: torch.Tensor) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        c = functional.all_gather_tensor_autograd(m.a(x), 0, dist.group.WORLD)
    return m.b(c * 1), mean_of([c * 1])


@enter("bfloat16 float16 int8", "1 01")
def differentiable_all_gather(m: Two, x: torch.Tensor) -> Result:
    parts = differentiable.all_gather(m.a(x))
    return m.b(torch.cat(parts)), mean_of(parts)


@enter("bfloat16 int8", "1 01")
def differentiable_all_reduce(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = differentiable.all_reduce(h.mean(0))
    return m.b(h - c / 2), c


@enter()
def differentiable_broadcast(m: Two, x: torch.Tensor) -> Result:
    c = differentiable.broadcast(m.a(x), 1)
    return m.b(c + x), c


@enter()
def differentiable_gather(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    parts = differentiable.gather(h, 0)
    y = m.b(h).square().mean()
    return y + (torch.cat(parts).square().mean() if dist.get_rank() == 0 else 0 * sum(part.sum() for part in parts)), h


@enter()
def differentiable_all_to_all(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    out = differentiable.all_to_all_single(torch.empty_like(h), h.contiguous())
    return m.b(out), out


@enter()
def differentiable_reduce_scatter(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    out = differentiable.reduce_scatter(torch.empty_like(h[:4]), [part.contiguous() for part in h.chunk(2)])
    return m.b(out), out


class GatherLayer(torch.autograd.Function):
    """As contrastive losses have it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x)
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        gradients = torch.stack(grads)
        dist.all_reduce(gradients)
        return gradients[dist.get_rank()]


@enter("bfloat16 float16 int8", "0 1 01")
def gathered_contrast(m: Two, x: torch.Tensor) -> Result:
    q, k = F.normalize(m.a(x), dim=1), F.normalize(m.b(x), dim=1)
    logits = torch.cat(GatherLayer.apply(q)) @ torch.cat(GatherLayer.apply(k)).t() / 0.5
    return F.cross_entropy(logits, torch.arange(2 * BATCH)), logits


class Normalized(torch.autograd.Function):
    """A norm across replicas, whose backward communicates in the format of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        dist.all_reduce(mean)
        return (x - mean / 2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        mean = grad.mean(0)
        dist.all_reduce(mean)
        return grad - mean / 2


@enter("bfloat16 float16 int8", "0 1 01")
def norm_across_replicas(m: Two, x: torch.Tensor) -> Result:
    return m.b(Normalized.apply(m.a(x)))


class Summed(torch.autograd.Function):
    """As detectron2's norm across replicas has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        return torch.stack(parts).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


@enter("bfloat16 int8", "1 01")
def batch_norm_across_replicas(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    mean, square = (Summed.apply(torch.cat([h.mean(0), h.square().mean(0)])) / 2).split(WIDTH)
    m.seen = 0.9 * m.seen + 0.1 * mean.detach()
    return m.b((h - mean) * torch.rsqrt(square - mean * mean + 1e-2))


class Momentum(Two):
    """``b`` follows ``a``; the queue takes the keys of all ranks."""

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self.b.load_state_dict(self.a.state_dict())
        self.b.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 32), dim=0))


@enter("bfloat16 float16 int8", "0 1 01", make=Momentum)
def momentum_contrast(m: Any, x: torch.Tensor) -> Result:
    q = F.normalize(m.a(x), dim=1)
    with torch.no_grad():
        for slow, fast in zip(m.b.parameters(), m.a.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
        k = F.normalize(m.b(x.flip(1)), dim=1)
        keys = [torch.ones_like(k) for _ in range(2)]
        dist.all_gather(keys, k.contiguous())
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.clone().detach()], 1) / 0.5
    m.queue = torch.cat([torch.cat(keys).t().float(), m.queue], 1)[:, :32]
    return F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long)), logits


@enter("bfloat16 int8", "0 1 01")
def codebook(m: Two, x: torch.Tensor) -> Result:
    """Codes are counted on all ranks; a margin keeps the choice from hanging on a rounding."""
    h = m.a(x)
    codes = torch.arange(BATCH) % 4 + 4 * dist.get_rank()
    chosen = F.one_hot(codes, 8).type(h.dtype)
    counts, sums = chosen.sum(0), chosen.t() @ h.detach()
    dist.all_reduce(counts)
    dist.all_reduce(sums)
    return m.b(h), counts, sums / counts.clamp(min=1)[:, None]


@enter("bfloat16 int8", "1")
def statistics_after_the_layer_is_frozen(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x).detach_().requires_grad_()
    c = h.detach().clone()
    dist.all_reduce(c)
    loss = m.b(h).square().mean() + c.mean()
    (inner,) = torch.autograd.grad(loss, h, retain_graph=True)
    dist.all_reduce(inner)
    return loss, inner


def _through_ddp(m: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    wrapped = nn.parallel.DistributedDataParallel(m)
    found = {}
    for micro in range(2):  # accumulation: the all-reduce comes with the second
        with wrapped.no_sync() if micro == 0 else torch.enable_grad():
            wrapped(x + micro)[0].float().square().mean().backward()
    found |= {f"gradient of {name}": parameter.grad for name, parameter in m.named_parameters()}
    return found


@enter("bfloat16 float16 int8", "1 01", step=_through_ddp)
def accumulated_through_ddp(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = h.detach().mean(0)
    dist.all_reduce(c)
    return (m.b(h - c / 2),)


def _compiled(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    # Not "eager", which runs the plan's own casts as if the model had written them; other backends lower them to operators.
    return train(torch.compile(model, backend="aot_eager"), x)


@enter("bfloat16 int8", step=_compiled)
def compiled_all_reduce(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = h.detach().mean(0)
    dist.all_reduce(c)
    return m.b(h - c / 2), c


@enter("bfloat16 int8", step=_compiled)
def compiled_all_gather(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    whole = torch.empty(2 * BATCH, WIDTH, dtype=h.dtype)
    dist.all_gather_into_tensor(whole, h.detach())
    return m.b(h), whole.float().mean(0)


@enter("bfloat16 int8", step=_compiled)
def compiled_broadcast(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    c = h.detach().clone()
    dist.broadcast(c, 1)
    return m.b(h), c


@enter("bfloat16", step=_compiled)
def compiled_functional_all_gather(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    return m.b(h), mean_of([functional.all_gather_tensor(h.detach(), 0, dist.group.WORLD) * 1])
