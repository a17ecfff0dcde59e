"""trace on the named models at tiny sizes: counts against known facts, FLOPs against torch's counter, names against the model's."""

from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nightly import nightly_but
from qsync_core.artifacts import files as artifact
from qsync_core.chains.finding import chains_of
from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from qsync_torch.tracing.trace import trace

BERT = "hidden=32,heads=2,vocab=60,seq=12"
JOBS = {
    "resnet18": "resnet18:image=32,width=4,classes=7",
    "resnet50": "resnet50:image=32,width=4,classes=7",
    "resnet18-small-stem": "resnet18:image=8,width=4,classes=7,small_stem=true,in_channels=1,channels_last=true",
    "vgg16": "vgg16:image=32,width=4,hidden=8,classes=7,pool_size=1",
    "vgg16_bn": "vgg16_bn:image=32,width=4,hidden=8,classes=7,pool_size=1",
    "bert-base": f"bert-base:layers=12,{BERT}",
    "bert-large": f"bert-large:layers=24,{BERT}",
    "bert-mlm": f"bert-base:layers=2,{BERT},head=mlm",
    "bert-eager": f"bert-base:layers=2,{BERT},attention=eager",
    "roberta-base": f"roberta-base:layers=12,{BERT}",
    "roberta-mlm": f"roberta-base:layers=2,{BERT},head=mlm",
}
IN_CI = {"resnet50", "resnet18-small-stem", "vgg16_bn", "bert-base", "bert-eager", "roberta-mlm"}
ADJUSTABLE = {
    "resnet18": {"conv2d": 20, "linear": 1},
    "resnet50": {"conv2d": 53, "linear": 1},
    "resnet18-small-stem": {"conv2d": 20, "linear": 1},
    "vgg16": {"conv2d": 13, "linear": 3},
    "vgg16_bn": {"conv2d": 13, "linear": 3},
    "bert-base": {"linear": 12 * 6 + 1},  # q, k, v, attention output, two of the feed-forward; the span head
    "bert-large": {"linear": 24 * 6 + 1},
    "bert-mlm": {"linear": 2 * 6 + 2},  # transform and the decoder, which is tied to the embedding
    "bert-eager": {"linear": 2 * 6 + 1},
    "roberta-base": {"linear": 12 * 6 + 2},  # pooler and classifier
    "roberta-mlm": {"linear": 2 * 6 + 2},
}


@pytest.fixture(scope="module", params=nightly_but(IN_CI, JOBS))
def named(request) -> tuple[str, Job, PrecisionDag]:
    job = load_job(JOBS[request.param], batch_size=2)
    return request.param, job, trace(job)


def test_every_linear_and_convolution_is_adjustable(named) -> None:
    name, _, dag = named
    assert Counter(operator.kind for operator in dag.adjustable) == ADJUSTABLE[name]
    assert not [operator for operator in dag.operators if operator.not_applicable]


def test_classes(named) -> None:
    name, _, dag = named
    by_class = {op_class: Counter(o.kind for o in dag.operators if o.op_class is op_class) for op_class in OpClass}
    guarded = {"batch_norm"} if name.startswith(("resnet", "vgg16_bn")) else {"layer_norm"}
    guarded = set() if name == "vgg16" else guarded | ({"softmax"} if name == "bert-eager" else set())
    assert set(by_class[OpClass.GUARDED]) == guarded
    assert set(by_class[OpClass.FIXED]) <= {"input", "embedding", "loss", "add", "div", "mul", "full", "masked_fill", "where"}
    assert by_class[OpClass.FIXED]["loss"] == (2 if name in ("bert-base", "bert-large", "bert-eager") else 1)
    if name == "resnet50":
        assert by_class[OpClass.DEPENDENT] == {"relu": 49, "add": 16, "max_pool2d": 1, "adaptive_avg_pool2d": 1}
        assert by_class[OpClass.GUARDED] == {"batch_norm": 53}
    if name == "bert-base":
        assert by_class[OpClass.DEPENDENT]["scaled_dot_product_attention"] == 12
        assert by_class[OpClass.GUARDED] == {"layer_norm": 25}


# Norms and GELUs by what is fused with them (packages/qsync-core/tests/ir/test_chains.py counts them out).
CHAINS = {
    "resnet18": {"batch_norm+relu": 9, "batch_norm+add+relu": 8, "batch_norm": 3},
    "resnet50": {"batch_norm+relu": 33, "batch_norm+add+relu": 16, "batch_norm": 4},
    "vgg16": {"relu": 15},
    "vgg16_bn": {"batch_norm+relu": 13, "relu": 2},
    "bert-base": {"add+layer_norm": 24, "layer_norm": 1, "gelu": 12},
    "bert-mlm": {"add+layer_norm": 4, "layer_norm": 2, "gelu": 3},
    "roberta-base": {"add+layer_norm": 25, "gelu": 12},
}


def test_chains(named) -> None:
    name, _, dag = named
    if name in CHAINS:
        assert Counter("+".join(dag[member].kind for member in chain.members) for chain in chains_of(dag)) == CHAINS[name]


def test_loss_is_cross_entropy_averaged(named) -> None:
    _, _, dag = named
    assert (dag.loss, dag.loss_reduction) == ("cross_entropy", "mean")


def test_flops_are_those_torch_counts(named) -> None:
    _, job, dag = named
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        job.compute_loss(job.batch(0, 2))
    products = ("linear", "conv2d", "scaled_dot_product_attention", "matmul", "bmm")
    assert sum(operator.flops for operator in dag.operators if operator.kind in products) == counter.get_total_flops()


def test_names_are_the_models(named) -> None:
    _, job, dag = named
    modules, parameters = dict(job.model.named_modules()), dict(job.model.named_parameters())
    assert [p.fqn for p in dag.parameters] == list(parameters)
    for operator in dag.adjustable:
        module = job.model.get_submodule(operator.op_id.fqn)
        assert modules[operator.op_id.fqn] is module
        assert isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
        assert operator.op_id.call == 0
        assert operator.variant_group == operator.op_id.fqn
        assert parameters[operator.parameters[0]] is module.weight
        assert operator.weight_shape == tuple(module.weight.shape)
        assert all(name in parameters for name in operator.parameters)


def test_shapes_are_those_of_a_real_run(named) -> None:
    _, job, dag = named
    seen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    handles = [
        job.model.get_submodule(o.op_id.fqn).register_forward_hook(
            lambda module, args, output, name=o.op_id.fqn: seen.update({name: (tuple(args[0].shape), tuple(output.shape))})
        )
        for o in dag.adjustable
    ]
    job.compute_loss(job.batch(0, 2))
    for handle in handles:
        handle.remove()
    assert {o.op_id.fqn: (o.input_shapes[0], o.output_shape) for o in dag.adjustable} == seen


def test_order_depth_and_reach(named) -> None:
    _, _, dag = named
    depth: dict[OpId, int] = {}
    for operator in dag.operators:
        depth[operator.op_id] = max((depth[source] + 1 for source in operator.inputs), default=0)
        assert operator.depth == depth[operator.op_id]
    # Everything a plan can lower reaches the loss.
    reached = {dag.operators[-1].op_id}
    for operator in reversed(dag.operators):
        if operator.op_id in reached:
            reached.update(operator.inputs)
    assert {operator.op_id for operator in dag.adjustable} <= reached


def test_it_says_where_the_batch_is(named) -> None:
    text, job, dag = named
    assert set(dag.batch_axes.values()) == {0}
    assert len(dag.batch_axes) == len(job.batch(0, 2).args) + len(job.batch(0, 2).kwargs), text


def test_it_survives_a_file(named, tmp_path) -> None:
    _, _, dag = named
    artifact.save(dag, tmp_path / "dag.qsync")
    assert artifact.load(tmp_path / "dag.qsync", PrecisionDag) == dag


def test_tracing_twice_gives_the_same_bytes() -> None:
    text = JOBS["resnet18"]
    assert artifact.digest(trace(load_job(text, 2))) == artifact.digest(trace(load_job(text, 2)))


def test_tracing_leaves_the_model_as_it_was() -> None:
    job = load_job(JOBS["resnet18"], 2)
    job.model.eval()
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    dag = trace(job)
    assert not any(module.training for module in job.model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in job.model.state_dict().items())
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert torch.equal(random_state, torch.random.get_rng_state())
    # ... and yet the graph is that of training: statistics of the batch.
    norm = next(operator for operator in dag.operators if operator.kind == "batch_norm")
    assert ",true,0.1," in norm.attributes["call"]


def test_only_the_first_convolution_needs_no_input_gradient() -> None:
    dag = trace(load_job(JOBS["resnet18"], 2))
    assert [str(o.op_id) for o in dag.operators if o.no_grad_inputs] == ["conv1#0"]


def test_query_key_and_value_read_one_activation() -> None:
    dag = trace(load_job(JOBS["bert-mlm"], 2))
    prefix = "bert.encoder.layer.1.attention.self"
    source = OpId("bert.encoder.layer.0.output.LayerNorm")
    for name in ("query", "key", "value"):
        assert dag[OpId(f"{prefix}.{name}")].inputs == (source,)
    attention = dag[OpId(f"{prefix}.scaled_dot_product_attention")]
    assert attention.inputs == tuple(OpId(f"{prefix}.{name}") for name in ("query", "key", "value"))
    assert attention.op_class is OpClass.DEPENDENT


def test_the_tied_decoder_uses_the_embeddings_parameter() -> None:
    dag = trace(load_job(JOBS["bert-mlm"], 2))
    decoder = dag[OpId("cls.predictions.decoder")]
    assert decoder.parameters[0] == "bert.embeddings.word_embeddings.weight"
    assert decoder.is_adjustable
    assert sum(p.fqn == decoder.parameters[0] for p in dag.parameters) == 1
    assert sum(bucket.parameters.count(decoder.parameters[0]) for bucket in dag.buckets) == 1


def test_residual_edges_of_a_block() -> None:
    dag = trace(load_job(JOBS["resnet18"], 2))
    assert dag[OpId("layer2.0.add")].inputs == (OpId("layer2.0.bn2"), OpId("layer2.0.downsample.1"))
    assert dag[OpId("layer2.1.add")].inputs == (OpId("layer2.1.bn2"), OpId("layer2.0.relu", 1))
    assert dag[OpId("layer2.0.downsample.0")].inputs == dag[OpId("layer2.0.conv1")].inputs == (OpId("layer1.1.relu", 1),)
    assert dag[OpId("fc")].inputs == (OpId("avgpool"),)
    assert dag[OpId("layer2.0.conv1")].attributes == {"stride": "2,2", "padding": "1,1", "dilation": "1,1", "groups": "1"}


def test_the_memory_format_is_part_of_what_a_convolution_costs() -> None:
    dag = trace(load_job(JOBS["resnet18-small-stem"], 2))
    wide = [operator for operator in dag.adjustable if operator.kind == "conv2d" and operator.input_shapes[0][1] > 1]
    assert sum(o.attributes.get("memory_format") == "channels_last" for o in wide) >= 10
