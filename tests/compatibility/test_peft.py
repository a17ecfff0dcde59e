"""Low-rank adapters of PEFT on layers of a plan, in a tiny BERT."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compatibility.job import difference
from qsync_core.errors import PlanError
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import apply_

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from robustness.reference import SUMS, Reference, sums_by

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

INT8, BFLOAT16 = (Variant.of(precision, rounding=Rounding.NEAREST).in_float32 for precision in (Precision.INT8, Precision.BFLOAT16))
LAYER = "bert.encoder.layer.{}.{}"
VARIANTS = {
    LAYER.format(0, "attention.self.query"): INT8,
    LAYER.format(0, "intermediate.dense"): BFLOAT16,
    LAYER.format(1, "attention.self.query"): BFLOAT16,
    LAYER.format(1, "attention.self.value"): INT8,
    LAYER.format(1, "output.dense"): INT8,
}
ADAPTED = ("query", "value")


def bert() -> Any:
    """Two layers, 32 wide, without dropout."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **dropped, num_labels=3))


def adapted(model: Any) -> Any:
    """With adapters that are not zero, and the head trained whole."""
    torch.manual_seed(1)
    options = {"target_modules": list(ADAPTED), "modules_to_save": ["classifier"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options)).train()


def inside(name: str) -> str:
    """The name of a layer once adapters are on it, or on others."""
    return f"base_model.model.{name}{'.base_layer' if name.endswith(ADAPTED) else ''}"


def plan(names: Any = str, variants: Mapping[str, Variant] = VARIANTS) -> dict[OpId, Variant]:
    """Variants by operator."""
    return {OpId(names(name)): variant for name, variant in variants.items()}


def step(model: Any) -> list[torch.Tensor]:
    """Gradients of what is trained: adapters and head."""
    tokens = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(2))
    F.cross_entropy(model(input_ids=tokens).logits, torch.arange(4) % 3).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]


def before() -> list[torch.Tensor]:
    """A plan first, adapters on its layers then."""
    model = bert()
    apply_(model, plan())
    return step(adapted(model))


def test_adapters_after_apply() -> None:
    """Against a reference that knows the base layers by their weights; adapters compute in full precision."""
    differences = []
    for who in SUMS:
        twin = adapted(bert())
        with sums_by(who), Reference(twin, {inside(name): variant for name, variant in VARIANTS.items()}).running():
            differences.append(difference(before(), step(twin)))
    assert min(differences) < 1e-4
    assert difference(before(), step(adapted(bert()))) > 1e-3


def test_adapters_before_apply() -> None:
    model = adapted(bert())
    apply_(model, plan(inside))
    assert difference(step(model), before()) == 0


def whole_plan() -> PrecisionPlan:
    """Of a model without adapters, as ``qsync plan`` makes it: it names every linear."""
    names = [OpId(name) for name, module in bert().named_modules() if isinstance(module, torch.nn.Linear)]
    entries = {name: Assignment(VARIANTS.get(name.fqn, Variant.of(Precision.FLOAT32)), "aten", "", "by hand") for name in names}
    group = GroupPlan("infer", Role.INFER, 1, DeviceType("cpu", DeviceKind.CPU), Precision.FLOAT32, entries)
    return PrecisionPlan("bert", "", tuple(names), {}, "by hand", "", 1, 1, 0.0, None, (group,), "", output_formats=OutputFormats())


@pytest.mark.parametrize("entries", [plan, whole_plan])
@pytest.mark.parametrize("part", ["", "base_model.model"])
def test_a_plan_without_adapters_on_a_model_that_has_them(entries: Any, part: str) -> None:
    said = r"no linear or convolution bert\.encoder.* there are adapters on it that the plan does not know: call apply_ before they"
    with pytest.raises(PlanError, match=said):
        apply_(adapted(bert()).get_submodule(part), entries())


def test_a_whole_plan_goes_first() -> None:
    """What the refusal advises: before the adapters are added."""
    model = bert()
    apply_(model, whole_plan())
    assert difference(step(adapted(model)), before()) == 0


def test_merged_adapters() -> None:
    """Merging changes the weights of planned layers in place; what they compute follows."""
    merged, plain = bert(), bert()
    apply_(merged, plan())
    merged, plain = adapted(merged), adapted(plain)
    merged.merge_adapter()
    plain.merge_adapter()
    assert torch.equal(
        merged.base_model.model.bert.encoder.layer[0].attention.self.query.base_layer.weight,
        plain.base_model.model.bert.encoder.layer[0].attention.self.query.base_layer.weight,
    )
    tokens = torch.arange(8)[None]
    output, exact = merged(input_ids=tokens).logits, plain(input_ids=tokens).logits
    assert 0 < difference([output], [exact]) < 0.05
    assert torch.equal(merged.eval()(input_ids=tokens).logits, plain.eval()(input_ids=tokens).logits)
