"""Frozen weights that a plan stores in other formats: ranks that differ, and adapters of PEFT on top of them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from compatibility import adapted_layers
from compatibility.job import difference, difference_of_ranks
from compatibility.two_ranks import on_two_ranks, refused_on_two_ranks
from qsync_core.errors import PlanError, TraceError
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import apply_, load_planned
from qsync_torch.apply.stored_modules import STORED
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:the copy of a model that runs under a plan")
STORED_AS = ("bfloat16@nf4", "bfloat16")
ADAPTED = ["q_proj", "v_proj"]


def llama(tied: bool = False) -> Any:
    """Two layers, 32 wide, held in bfloat16."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def adapted(model: Any, **options: Any) -> Any:
    """With adapters that are not zero."""
    torch.manual_seed(1)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ADAPTED, "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**config)).train()


def bases(model: nn.Module) -> list[str]:
    """Linears whose weight is frozen, by name."""
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]


def tokens(seed: int = 2) -> torch.Tensor:
    return torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, seed: int = 2) -> torch.Tensor:
    x = tokens(seed)
    return F.cross_entropy(model(input_ids=x, use_cache=False).logits.flatten(0, 1).float(), x.flatten())


def gradients(model: Any) -> list[torch.Tensor]:
    """Of what is trained, in one step."""
    model.zero_grad()
    loss_of(model).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def plain(model: Any) -> Any:
    """A copy without a plan, with what is stored in its parameters."""
    return copy.deepcopy(model)


def plan_of(model: nn.Module) -> PrecisionPlan:
    """A whole plan of two groups that store alike nowhere; adapters run as the script has them."""
    names = [OpId(name) for name in bases(model)]
    others = [OpId(name) for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in bases(model)]

    def group(name: str, role: Role, variant: str) -> GroupPlan:
        entries = {op_id: Assignment(Variant.parse(variant), "aten", "", "by hand") for op_id in names}
        return GroupPlan(name, role, 1, DeviceType("cpu", DeviceKind.CPU), Precision.BFLOAT16, entries)

    groups = (group("train", Role.TRAIN, STORED_AS[1]), group("infer", Role.INFER, STORED_AS[0]))
    return PrecisionPlan(
        "llama", "", tuple(names), {}, "by hand", "", 1, 1, 0.0, None, groups, "train", unaddressed_ids=tuple(others),
        base=Precision.BFLOAT16, output_formats=OutputFormats(decides=False),
    )  # fmt: skip


def weight_of(module: nn.Module) -> torch.Tensor:
    """What a script reads, on one rank alone too."""
    return module.weight.detach().float()


@on_two_ranks
def test_ranks_that_store_in_different_formats(folder: Path) -> float:
    """The second rank's base weights stay its own, and adapters stay equal on both, bit by bit."""
    model = adapted(llama())
    name = bases(model)[0]
    applied = apply_(model, plan_of(model), group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
    module = model.get_submodule(name)
    own = weight_of(module).clone()
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    if not torch.equal(weight_of(module), own) or module.__dict__[STORED].storage.is_quantized != bool(dist.get_rank()):
        return 1.0
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(8):
        loss = loss_of(ddp, seed=2 * step + dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    apart = difference_of_ranks(p for p in model.parameters() if p.requires_grad)
    return apart if losses[-1] < losses[0] else 2.0


@on_two_ranks
def test_layers_that_have_adapters_beside_their_weight(folder: Path) -> float:
    """All are stored on the second rank and none on the first, where one runs in int8.  Adapters stay equal on both."""
    model = adapted_layers.adapted()
    modules = [model.get_submodule(name.removesuffix(".weight")) for name in adapted_layers.NAMES]
    own = [module.weight.clone() for module in modules]
    plan = adapted_layers.plan_of_adapted(DeviceType("cpu", DeviceKind.CPU))
    applied = apply_(model, plan, group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x = torch.randn(8, adapted_layers.WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())).bfloat16()
        ddp(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if [module.__dict__[STORED].storage.is_quantized for module in modules] != [bool(dist.get_rank())] * 3:
        return 1.0
    if not dist.get_rank() and not all(torch.equal(m.weight, weight) for m, weight in zip(modules, own, strict=True)):
        return 2.0
    return difference_of_ranks(model.parameters())


@on_two_ranks
def test_a_plan_below_the_wrapped_module(folder: Path) -> float:
    """Weights that one rank stores are no parameters on the other either: what DistributedDataParallel broadcasts fits."""
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    plan = plan_of(model)
    applied = apply_(model, plan, group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
    before = {name: value.float().clone() for name, value in model.state_dict().items()}
    task = nn.ModuleDict({"inner": model})
    DistributedDataParallel(task, **applied.ddp_options())
    return max(float((value.float() - before[name]).abs().max()) for name, value in model.state_dict().items())


@on_two_ranks
def test_gradient_checkpointing_on_the_small_rank_alone(folder: Path) -> float:
    """It changes no bit of the job: neither its graph, so that one plan is for both ranks, nor what is trained."""
    found = []
    for is_checkpointed in (False, True):
        model = adapted(llama())
        if is_checkpointed and dist.get_rank():
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        applied = apply_(model, plan_of(model), group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
        ddp = DistributedDataParallel(model, **applied.ddp_options())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(3):
            loss_of(ddp, seed=2 * step + dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters() if p.requires_grad])
    return difference(*found)


@on_two_ranks
def test_zero_redundancy_optimizer_with_frozen_parameters(folder: Path) -> float:
    """Made before the plan, of all parameters: it sends each to the other rank, whatever that one stores."""
    model = adapted(llama().float())  # it takes parameters of one format
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    applied = apply_(model, plan_of(model), group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
    wanted = [weight_of(model.get_submodule(name)).clone() for name in bases(model)]
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ddp, seed=2 * step + dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    apart = difference_of_ranks(p for p in model.parameters() if p.requires_grad)
    kept = difference([weight_of(model.get_submodule(name)) for name in bases(model)], wanted)
    applied.remove()
    again = difference([weight_of(model.get_submodule(name)) for name in bases(model)], wanted)
    return apart + kept + again


@on_two_ranks
def test_states_of_torchs_checkpoints(folder: Path) -> float:
    """Of a model and its optimizer, which give back what they had."""
    model = adapted(llama())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    applied = apply_(model, plan_of(model), group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    loss_of(ddp).backward()
    optimizer.step()
    parts = get_state_dict(model, optimizer)
    states = [{name: value.clone() for name, value in parts[0].items()}, copy.deepcopy(parts[1])]
    loss_of(ddp).backward()
    optimizer.step()
    model.get_submodule(bases(model)[0]).weight.data = torch.zeros(32, 32)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    now = model.state_dict()
    return max(float((now[name].float() - value.float()).abs().max()) for name, value in states[0].items())


@on_two_ranks
def test_fully_shard_after_the_plan(folder: Path) -> float:
    """What is stored, on any rank, is not sharded; gradients are those of the ranks' own weights."""
    model = adapted(llama())
    apply_(model, plan_of(model), group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
    reference = plain(model)
    fully_shard(model)
    loss_of(model, seed=dist.get_rank()).backward()
    loss_of(reference, seed=dist.get_rank()).backward()
    worst = 0.0
    trained = [p for p in model.parameters() if p.grad is not None]
    for mine, theirs in zip(trained, [p for p in reference.parameters() if p.grad is not None], strict=True):
        mean = theirs.grad.double()
        dist.all_reduce(mean)
        worst = max(worst, float((mine.grad.full_tensor() - mean / 2).norm() / (mean / 2).norm()))
    return 0.0 if worst < 1e-6 else worst


@refused_on_two_ranks
def test_fully_shard_before_a_plan_that_stores(folder: Path) -> None:
    model = adapted(llama())
    fully_shard(model)
    apply_(model, plan_of(model), group=("train", "infer")[dist.get_rank()], allow_flags=["share"])


@refused_on_two_ranks
def test_unfreezing_a_stored_weight(folder: Path) -> None:
    model = adapted(llama())
    apply_(model, plan_of(model), group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
    layer, refused = (
        model.get_submodule(bases(model)[0]),
        pytest.raises(PlanError, match="no parameter of the model then and is not"),
    )
    if dist.get_rank():
        with refused:
            layer.weight.requires_grad_(True)
        loss_of(model)
    else:
        layer.weight.requires_grad_(True)
        with refused:
            loss_of(model)
    model.requires_grad_(True)


@on_two_ranks
def test_ranks_that_hold_different_frozen_weights_are_refused(folder: Path) -> float:
    model = adapted(llama())
    with torch.no_grad():
        model.get_parameter(f"{bases(model)[0]}.weight")[0, 0] += dist.get_rank()
    with pytest.raises(PlanError, match=r"different frozen weights in bfloat16 \(\w+ on rank 0; \w+ on rank 1\), and what a plan"):
        apply_(model, plan_of(model), group=("train", "infer")[dist.get_rank()], allow_flags=["share"])
    return 0.0


def saved(folder: Path) -> Path:
    """A folder of this rank's own, with a checkpoint of the base."""
    from safetensors.torch import save_file

    own = folder / f"checkpoint{dist.get_rank()}"
    own.mkdir()
    save_file(llama().state_dict(), own / "model.safetensors")
    return own


def on_meta() -> Any:
    """The base without values; buffers have some."""
    model = llama()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    return model


def loaded(model: nn.Module, folder: Path) -> Any:
    return load_planned(model, plan_of(model), folder, group=("train", "infer")[dist.get_rank()], allow_flags=["share"])


@on_two_ranks
def test_ranks_load_their_weights_straight_into_their_formats(folder: Path) -> float:
    """One rank loads so, the other by itself; both then hold what the checkpoint has, each in its format."""
    own = saved(folder)
    model = on_meta() if dist.get_rank() else llama().requires_grad_(False)
    if dist.get_rank():
        loaded(model, own)
    else:
        apply_(model, plan_of(model), group="train", allow_flags=["share"])
    wanted = llama().state_dict()
    return max(float((value.float() - wanted[name].float()).abs().max()) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_on_the_meta_device_get_values_before_the_base_is_loaded(tmp_path: Path, tied: bool) -> None:
    """As docs/frozen-weights.md has it; without its lines each is refused with what to write."""
    from accelerate import init_empty_weights
    from peft.tuners.lora import LoraLayer

    exact = llama(tied=tied)
    exact.save_pretrained(tmp_path)
    with init_empty_weights():
        model = llama(tied=tied)
    if tied:
        model.requires_grad_(False)
        with pytest.raises(
            PlanError, match=r"holds no lm_head.weight.* the model ties it .*: call model.tie_weights\(\) after that"
        ):
            load_planned(model, {"model.layers.0.mlp.down_proj": "bfloat16@nf4"}, tmp_path, base=Precision.BFLOAT16)
    model.tie_weights()
    model = adapted(model)
    variants = dict.fromkeys((name for name in bases(model) if "lm_head" not in name), "bfloat16@nf4")
    with pytest.raises(PlanError, match=r"lora_A.default.weight, .* needs values before; PEFT makes adapters on the meta device"):
        load_planned(model, variants, tmp_path, base=Precision.BFLOAT16)
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for part in (module.lora_A, module.lora_B):
                part.to_empty(device="cpu")
            module.reset_lora_parameters("default", init_lora_weights=True)
            nn.init.normal_(module.lora_B["default"].weight)  # which are zeros, behind which A has no gradient
    wanted = adapted(exact)
    for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        if mine.requires_grad:
            theirs.data.copy_(mine.data)
    load_planned(model, variants, tmp_path, base=Precision.BFLOAT16)
    apply_(wanted, variants, base=Precision.BFLOAT16)
    assert difference(gradients(model), gradients(wanted)) == 0


@refused_on_two_ranks
def test_ranks_that_load_other_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    own = saved(folder)
    if dist.get_rank():
        weights = load_file(own / "model.safetensors")
        next(weight for name, weight in weights.items() if name.endswith("down_proj.weight"))[0, 0] += 1
        save_file(weights, own / "model.safetensors")
    loaded(on_meta(), own)


@refused_on_two_ranks
def test_a_checkpoint_that_one_rank_lacks(folder: Path) -> None:
    loaded(on_meta(), saved(folder) / ("missing" if dist.get_rank() else ""))


@refused_on_two_ranks
def test_a_checkpoint_that_one_rank_cannot_read_to_its_end(folder: Path) -> None:
    """It has other shapes there, which is found while it is read: what was loaded is taken back."""
    from safetensors.torch import load_file, save_file

    own = saved(folder)
    if dist.get_rank():
        weights = load_file(own / "model.safetensors")
        save_file({**weights, "model.norm.weight": torch.zeros(3)}, own / "model.safetensors")
    loaded(on_meta(), own)


@pytest.mark.parametrize("first", ["plan", "adapters"])
def test_adapters_on_stored_weights(first: str) -> None:
    """The plan before the adapters, or after them: steps are those of the dequantized weights."""
    model = llama()
    if first == "adapters":
        model = adapted(model)
        apply_(model, dict.fromkeys(bases(model), "bfloat16@nf4"), base=Precision.BFLOAT16)
    else:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        apply_(model, dict.fromkeys(bases(model), "bfloat16@nf4"), base=Precision.BFLOAT16)
        model = adapted(model)
    found = gradients(model)
    assert len(found) == 8
    assert difference(found, gradients(plain(model))) == 0


def test_dora_on_stored_weights() -> None:
    model = adapted(llama(), use_dora=True)
    apply_(model, dict.fromkeys(bases(model), "bfloat16@int8-row"), base=Precision.BFLOAT16)
    assert difference(gradients(model), gradients(plain(model))) == 0


def test_dora_on_stored_weights_compiled() -> None:
    model = adapted(llama(), use_dora=True)
    apply_(model, dict.fromkeys(bases(model), "bfloat16@int8-row"), base=Precision.BFLOAT16)
    wanted = gradients(model)
    model.zero_grad()
    loss_of(torch.compile(model, backend="aot_eager")).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert all((mine - theirs).norm() <= 0.02 * theirs.norm() for mine, theirs in zip(found, wanted, strict=True))


def test_modules_to_save_beside_stored_weights() -> None:
    model = adapted(llama(), modules_to_save=["lm_head"])
    names = [name for name in bases(model) if "lm_head" not in name]
    with pytest.raises(
        PlanError, match=r"lm_head.modules_to_save.default cannot be stored as nf4: it is trained, and only weights"
    ):
        apply_(model, {"base_model.model.lm_head.modules_to_save.default": "bfloat16@nf4"}, base=Precision.BFLOAT16)
    apply_(model, dict.fromkeys(names, "bfloat16@nf4"), base=Precision.BFLOAT16)
    assert difference(gradients(model), gradients(plain(model))) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = peft.get_peft_model_state_dict(model)
    assert any("lm_head" in name for name in saved)


def test_merging_says_that_it_rounds() -> None:
    model = adapted(llama())
    apply_(model, dict.fromkeys(bases(model), "bfloat16@int8-row"), base=Precision.BFLOAT16)
    exact = plain(model)
    with pytest.warns(UserWarning, match=r"is stored as int8-row: what is written into it, such as a merged adapter, is rounded"):
        model.merge_adapter()
    exact.merge_adapter()
    name = next(name for name in bases(exact) if name.endswith("q_proj.base_layer"))
    mine, theirs = model.get_submodule(name).weight.float(), exact.get_submodule(name).weight.float()
    assert 0 < (mine - theirs).abs().max() <= theirs.abs().max() / 100
    with pytest.warns(UserWarning, match=r"is stored as int8-row: what is written into it, .* is rounded"):
        model.unmerge_adapter()
    again = (model.get_submodule(name).weight.float() - plain(adapted(llama())).get_submodule(name).weight.float()).abs().max()
    assert 0 < again <= theirs.abs().max() / 50, "each of the two rounds"


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "OFTConfig"])
def test_adapters_of_other_kinds_are_taken_off(kind: str) -> None:
    """Which gives each module its own weight back."""
    options = {"feedforward_modules": []} if kind == "IA3Config" else {}
    options |= {"r": 0, "oft_block_size": 16} if kind == "OFTConfig" else {}
    model = peft.get_peft_model(llama(), getattr(peft, kind)(target_modules=ADAPTED, **options))
    names = [name for name in bases(model) if name.endswith(("q_proj.base_layer", "v_proj.base_layer"))]
    apply_(model, dict.fromkeys(names, "bfloat16@int8-row"), base=Precision.BFLOAT16)
    wanted = plain(model).merge_and_unload()
    with pytest.warns(UserWarning, match="is rounded"):
        merged = model.merge_and_unload()
    with torch.no_grad():
        mine, theirs = (one.eval()(input_ids=tokens(), use_cache=False).logits.float() for one in (merged, wanted))
    assert (mine - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_over_stored_weights(reentrant: bool) -> None:
    model = adapted(llama())
    apply_(model, dict.fromkeys(bases(model), "bfloat16@nf4"), base=Precision.BFLOAT16)
    wanted = gradients(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert difference(gradients(model), wanted) == 0


def test_a_head_that_is_tied_to_its_embedding_is_not_stored() -> None:
    model = adapted(llama(tied=True))
    with pytest.raises(PlanError, match=r"lm_head cannot be stored as nf4: another module has it too \(tied weights\)"):
        apply_(model, {"base_model.model.lm_head": "bfloat16@nf4"}, base=Precision.BFLOAT16)


def test_weights_in_sixteen_bits_that_are_trained() -> None:
    """Where the job has them so: gradients and updates are in bfloat16, as without a plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    x = torch.randn(4, 16).bfloat16()
    reference = [parameter.clone() for parameter in model.parameters()]
    apply_(model, {"0": "bfloat16", "2": "int8"}, base=Precision.BFLOAT16)
    model(x).float().square().mean().backward()
    assert all(parameter.grad.dtype is torch.bfloat16 for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(not torch.equal(parameter, before) for parameter, before in zip(model.parameters(), reference, strict=True))


def test_layers_of_bitsandbytes_are_no_operators() -> None:
    """Their weights are packed already: a plan for them is refused, and others run beside them."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Linear(64, 64), bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4"), nn.Linear(64, 4)).to("cpu")
    with pytest.raises(PlanError, match=r"the weight of 1 is uint8, and plans are for float32 parameters"):
        apply_(model, {"1": "float32@nf4"})
    refused_to_be_planned(model)
    apply_(model, {"0": "bfloat16"})
    model(torch.randn(8, 64)).sum().backward()


def refused_to_be_planned(model: nn.Module) -> None:
    """As a job, which ``qsync prepare`` traces."""
    job = Job("quantized", model, lambda step, size: Batch((torch.randn(size, 64),)), lambda y, _: y.sum(), torch.optim.SGD, 2)
    with pytest.raises(
        TraceError, match=r"parameter 1\.weight of quantized is a \w+, whose .*: give QSync the model with float wei"
    ):
        trace(job)


def test_eight_bit_layers_of_bitsandbytes_are_no_operators() -> None:
    """Whose weight is int8 once it is on a device that it was quantized for; before, it is float16."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(torch.zeros(64, 64, dtype=torch.int8), has_fp16_weights=False, requires_grad=False)
    model = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 4))
    with pytest.raises(PlanError, match=r"the weight of 1 is int8, and plans are for float32 parameters"):
        apply_(model, {"1": "float32@nf4"})
    refused_to_be_planned(model)
    apply_(model, {"0": "bfloat16"})
