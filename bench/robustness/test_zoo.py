"""Every job of the zoo is traced, or refused in one sentence that names a line; some are trained as row T1 trains all."""

from __future__ import annotations

import pytest
import torch

from nightly import nightly_but
from qsync_core.errors import TraceError
from qsync_core.ir.formats import OutputFormats
from qsync_torch.tracing.trace import trace
from robustness import zoo_formats, zoo_runs
from robustness.zoo import ZOO

REFUSED = {"Branching": "operators.py:"}
"""Jobs that cannot be traced, and what the sentence names."""

FAMILIES = ("GPT2LMHeadModel", "MixtralForCausalLM", "WhisperForConditionalGeneration")
"""Those of transformers that are tried here; the benchmark tries all."""

NAMES = [
    name for name in ZOO if name in FAMILIES or not name.endswith(("LM", "Classification", "Segmentation", "Generation", "Model"))
]

IN_CI = {
    "GPT2LMHeadModel", "Lstm", "Branching", "auxiliary_head_unused", "DataclassOutput", "summed_loss", "OwnCheckpoint",
    "OwnFunction", "GradientHook", "weight_norm", "Functional", "Einsum",
}  # fmt: skip
"""Some of every kind; the others are for the nightly environment."""

JOBS = ("Encoder", "Repeated", "Tied", "weight_norm", "checkpointed", "checkpointed_closure_reentrant", "convolutions", "hooked")


@pytest.mark.parametrize("name", nightly_but(IN_CI, NAMES))
def test_a_job_is_traced_or_refused(name: str) -> None:
    job = ZOO[name]()
    if name in REFUSED:
        with pytest.raises(TraceError, match=REFUSED[name]) as error:
            trace(job)
        assert "\n" not in str(error.value)
        return
    dag = trace(job)
    assert sum(len(bucket.parameters) for bucket in dag.buckets) == sum(p.requires_grad for p in dag.parameters)
    assert all(operator.flops > 0 for operator in dag.operators if operator.kind != "input" and operator.output_numel)


@pytest.mark.parametrize("name", nightly_but({"Encoder", "checkpointed", "Tied"}, JOBS))
def test_a_job_runs_right_under_plans(name: str) -> None:
    outcome = zoo_runs.run(name, swaps=1)
    assert outcome.status == "right", outcome.detail
    assert outcome.steps == 9


NEAR_ZERO = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="without instructions for bfloat16 an activation is rounded the other way, and a ReLU near zero or a maximum with it",
)


@pytest.mark.parametrize(
    "name",
    [
        "adds in place",
        "reads formats",
        pytest.param("convolutions", marks=NEAR_ZERO),
        pytest.param("Encoder", marks=NEAR_ZERO),
        "GPT2LMHeadModel",
    ],
)
def test_functions_between_operators_need_no_promotion(name: str) -> None:
    row = zoo_formats.run(name)
    assert row["status"] == "right", row


def test_with_all_outputs_in_16_bits_a_job_that_needs_float32_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputFormats, "delivered", lambda self, fqn, outputs: outputs[fqn])
    assert zoo_formats.run("adds in place")["status"] == "silent"


@pytest.mark.parametrize("name", ["Bilinear", "Branching"])
def test_a_job_is_refused_in_a_sentence(name: str) -> None:
    outcome = zoo_runs.run(name)
    assert outcome.status == "refused", outcome.detail


def test_jobs_repeat_themselves() -> None:
    assert len(ZOO) >= 40
    for name in ("mlp", "Einsum", "GPT2LMHeadModel"):
        one, two = ZOO[name](), ZOO[name]()
        assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one.batch(3, 4).tensors, two.batch(3, 4).tensors, strict=True))
