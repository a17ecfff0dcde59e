"""What trainers are set to, held against the plan; and what they do beside training: evaluate, log, keep the best model."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from plans import COMMUNICATION, plan_of
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch import InStepGradScaler, apply_
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.distributed.communication import BUFFERS
from qsync_torch.integrations import accelerate, lightning, transformers
from qsync_torch.integrations.planned_training import PlannedTraining
from qsync_torch.integrations.torchtitan import HybridConverter

INT8, BFLOAT16 = Precision.INT8, Precision.BFLOAT16
IN_FLOAT32 = "trains {}, but the plan is for a job without autocast: set {}, or plan again for a job {}"
GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = [{"x": torch.randn(6, generator=GENERATOR), "labels": torch.tensor(index % 3)} for index in range(24)]
PAIRS = [(sample["x"], sample["labels"]) for sample in SAMPLES]


class Net(nn.Module):
    """Returns its loss where it is given labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.second(torch.relu(self.first(x)))
        return logits if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        return self.net(*batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def each_alone(own_process, monkeypatch, tmp_path):
    """No trainer meets what another left."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "QSYNC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("QSYNC_GROUP", "infer")
    monkeypatch.chdir(tmp_path)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plan(model=None, prefix="", base=Precision.FLOAT32, **changes):
    lowered = {f"{prefix}first": BFLOAT16 if base is BFLOAT16 else INT8}
    return plan_of(model or Net(), lowered, base=base, **changes)


def in_bfloat16():
    """A plan for a job under autocast, and another that lowers nothing of it."""
    return plan(base=BFLOAT16)


def trainer_of(model=None, **arguments):
    known = {"use_cpu": True, "report_to": "none", "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.1}
    known |= {"train_sampling_strategy": "sequential", "disable_tqdm": True, "lr_scheduler_type": "constant", "optim": "sgd"}
    return Trainer(
        model or Net(), TrainingArguments("checkpoints", **known | arguments), train_dataset=SAMPLES, eval_dataset=SAMPLES
    )


def hybrid_accelerator(accelerator, model, run, **options):
    return accelerate.hybrid(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), None, SAMPLES, run=run, **options)


def fit(strategy, module=None, **arguments):
    known = {"accelerator": "cpu", "devices": 1, "max_steps": 4, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = LightningTrainer(strategy=strategy, **known | quiet | arguments)
    trainer.fit(module or Module(), DataLoader(PAIRS, batch_size=4))
    return trainer


def by_hand(run, steps=4, base=Precision.FLOAT32, clip=None):
    """The parameters after a loop without a trainer, whose batches are the samples in their order."""
    model = Net()
    apply_(model, run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        part = PAIRS[4 * step : 4 * step + 4]
        with torch.autocast("cpu", torch.bfloat16, enabled=base is BFLOAT16):
            loss = model(torch.stack([x for x, _ in part]), torch.stack([label for _, label in part]))["loss"]
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture
def shared_at(monkeypatch):
    """The rounding steps at which buffers were shared."""
    steps = []
    monkeypatch.setattr(AppliedPlan, "share_buffers", lambda self: steps.append(self.step))
    return steps


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


class TestAutocast:
    """Another autocast than the plan's is refused in one sentence, before the first step, and the model is as it was."""

    @pytest.mark.parametrize("mode, under", [("bf16", "under autocast to bfloat16"), ("fp16", "under autocast to float16")])
    def test_accelerate(self, mode, under):
        model = Net()
        accelerator = SimpleNamespace(
            mixed_precision=mode, distributed_type=DistributedType.NO, num_processes=1, _models=[], gradient_accumulation_steps=1
        )
        with pytest.raises(PlanError) as refused:
            hybrid_accelerator(accelerator, model, plan())
        assert str(refused.value) == f"Accelerate is set to mixed_precision='{mode}' and " + IN_FLOAT32.format(
            under, "mixed_precision='no'", under
        )
        assert "forward" not in vars(model)

    def test_a_trainer(self):
        trainer = trainer_of(bf16=True)
        with pytest.raises(PlanError) as refused:
            transformers.hybrid(trainer, run=plan())
        under = "under autocast to bfloat16"
        assert str(refused.value) == "the trainer is set to bf16=True, fp16=False and " + IN_FLOAT32.format(
            under, "TrainingArguments(bf16=False, fp16=False)", under
        )

    def test_lightning(self):
        with pytest.raises(PlanError) as refused:
            fit(lightning.HybridStrategy(plan(), module="net"), precision="bf16-mixed")
        under = "under autocast to bfloat16"
        assert str(refused.value) == "the trainer is set to precision='bf16-mixed' and " + IN_FLOAT32.format(
            under, "Trainer(precision='32-true')", under
        )

    def test_lightning_with_other_parameters(self):
        with pytest.raises(
            PlanError, match=r"parameters in float32, and the trainer has precision='64-true': set one of 32-true, bf"
        ):
            fit(lightning.HybridStrategy(plan(), module="net"), precision="64-true")

    def test_a_plan_for_autocast(self):
        with pytest.raises(
            PlanError, match=r"mixed_precision='no' and trains without autocast, .* set mixed_precision='bf16', or plan"
        ):
            hybrid_accelerator(Accelerator(cpu=True), Net(), in_bfloat16())

    def test_where_it_is_the_plans_all_train_as_a_loop_under_autocast(self, tmp_path):
        expected = by_hand(in_bfloat16(), base=BFLOAT16)
        trainer = trainer_of(bf16=True, max_grad_norm=0.0)
        transformers.hybrid(trainer, run=in_bfloat16())
        trainer.train()
        assert same(trainer.model.state_dict(), expected)

        module = Module()
        strategy = lightning.HybridStrategy(in_bfloat16(), module="net")
        sequential = fit(strategy, module, precision="bf16-mixed", use_distributed_sampler=False)
        assert same(sequential.lightning_module.net.state_dict(), expected)

        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), Net()
        hybrid_accelerator(accelerator, model, in_bfloat16())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(PAIRS, batch_size=4))
        for _, (x, labels) in zip(range(4), loader, strict=False):
            accelerator.backward(model(x, labels)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        assert same(accelerator.unwrap_model(model).state_dict(), expected)


@pytest.mark.parametrize("steps", [2, 3])
class TestAccumulation:
    """Another number of micro-batches than planned is told, and the planned one is not."""

    @contextmanager
    def told(self, steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield plan(accumulate=2)
        found = [str(warning.message) for warning in caught if "accumulates gradients" in str(warning.message)]
        assert len(found) == (steps != 2)
        assert all(f"over {steps} micro-batches in an optimizer step, and the plan was made for 2: " in text for text in found)

    def test_accelerate(self, steps):
        with self.told(steps) as planned:
            hybrid_accelerator(Accelerator(cpu=True, gradient_accumulation_steps=steps), Net(), planned)

    def test_a_trainer(self, steps):
        with self.told(steps) as planned:
            transformers.hybrid(trainer_of(gradient_accumulation_steps=steps), run=planned)

    def test_lightning(self, steps):
        with self.told(steps) as planned:
            strategy = lightning.HybridStrategy(planned, module="net")
            fit(strategy, accumulate_grad_batches=steps, max_steps=1, use_distributed_sampler=False)


class TestAccelerate:
    def test_options_of_the_plan_join_those_of_the_script(self):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
        hybrid_accelerator(accelerator, Net(), plan())
        assert accelerator.ddp_handler.to_kwargs() == {
            "find_unused_parameters": True,
            "bucket_cap_mb": COMMUNICATION.bucket_cap_mb,
            BUFFERS: False,
            "gradient_as_bucket_view": True,
            "static_graph": False,
        }

    def test_a_plan_that_says_nothing_of_communication_leaves_the_accelerator_as_it_is(self):
        accelerator = Accelerator(cpu=True)
        hybrid_accelerator(accelerator, Net(), plan(communication=None))
        assert accelerator.ddp_handler is None

    def test_trackers_are_told_once(self):
        class Kept(GeneralTracker):
            name, requires_logging_directory = "kept", False

            def __init__(self):
                self.main_process_only, self.logged = True, []

            @property
            def tracker(self):
                return self.logged

            @on_main_process
            def store_init_configuration(self, values):
                pass

            @on_main_process
            def log(self, values, step, **_):
                self.logged.append((values, step))

        kept = Kept()
        accelerator = Accelerator(cpu=True, log_with=kept)
        accelerator.init_trackers("digits")
        hybrid_accelerator(accelerator, Net(), plan())
        counts = {"qsync/train/float32": 2.0, "qsync/infer/int8": 1.0, "qsync/infer/float32": 1.0}
        assert kept.logged == [({"qsync/predicted_step_ms": 1.5} | counts, 0)]

    def test_stored_weights_are_told_apart(self):
        whole = plan()
        (infer,) = (group for group in whole.groups if group.group == "infer")
        first = OpId("first")
        stored = {first: attrs.evolve(infer.assignments[first], variant=Variant.named("float32@nf4"))}
        infer = attrs.evolve(infer, assignments={**infer.assignments, **stored})
        groups = tuple(infer if group.group == "infer" else group for group in whole.groups)
        planned = PlannedTraining(None, attrs.evolve(whole, groups=groups))
        assert planned.metrics() == {"qsync/predicted_step_ms": 1.5} | {
            "qsync/train/float32": 2.0, "qsync/infer/float32@nf4": 1.0, "qsync/infer/float32": 1.0,
        }  # fmt: skip

    def test_a_prepared_model_is_refused(self):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(Net())
        with pytest.raises(PlanError, match=r"accelerator\.prepare has wrapped this model already: call hybrid before it"):
            hybrid_accelerator(accelerator, model, plan())

    def test_sharded_training_is_refused(self):
        accelerator = SimpleNamespace(mixed_precision="no", distributed_type=DistributedType.FSDP, num_processes=2, _models=[])
        with pytest.raises(
            PlanError, match=r"DistributedDataParallel, and this accelerator is configured for FSDP: launch it with"
        ):
            hybrid_accelerator(accelerator, Net(), plan())

    def test_a_process_that_would_train_alone_is_refused(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        accelerator = SimpleNamespace(mixed_precision="no", distributed_type=DistributedType.NO, num_processes=1, _models=[])
        with pytest.raises(
            PlanError, match=r"one of 2 processes, and its accelerator trains alone: on CPUs set ACCELERATE_USE_CPU=1"
        ):
            hybrid_accelerator(accelerator, Net(), plan())

    def test_variants_by_operator_are_refused(self):
        with pytest.raises(PlanError, match="whole plan, got variants by operator"):
            hybrid_accelerator(Accelerator(cpu=True), Net(), {"first#0": "int8"})


class TestTrainer:
    def test_evaluation_saving_and_the_best_model_are_those_of_a_model_without_a_plan(self, tmp_path):
        trainer = trainer_of(eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True, max_grad_norm=0.0)
        applied = transformers.hybrid(trainer, run=plan())
        trainer.train()
        assert applied.step == 4  # of training alone
        best = trainer.state.best_model_checkpoint
        step = int(best.rpartition("-")[2])
        assert same(trainer.model.state_dict(), by_hand(plan(), steps=step))
        plain = Net()
        plain.load_state_dict(load_file(f"{best}/model.safetensors"))
        x = torch.stack([sample["x"] for sample in SAMPLES])
        expected = torch.cat([plain(part) for part in x.split(8)])  # as it evaluates
        assert torch.equal(torch.from_numpy(trainer.predict(SAMPLES).predictions), expected)

    def test_buffers_are_shared_before_they_are_evaluated_or_saved_and_at_the_end(self, shared_at):
        trainer = trainer_of(max_steps=5, eval_strategy="steps", eval_steps=3, save_steps=2)
        transformers.hybrid(trainer, run=plan())
        trainer.train()
        assert shared_at == [2, 3, 4, 5, 5]  # trainers save at the end of training, too

    def test_training_on_rounds_on(self):
        trainer = trainer_of(max_grad_norm=0.0)
        applied = transformers.hybrid(trainer, run=plan())
        trainer.train()
        trainer.train()
        assert applied.step == 8

    @pytest.mark.parametrize("restores", [False, True])
    def test_a_resumed_run_has_the_rounding_step_of_its_checkpoint(self, restores):
        whole = trainer_of(save_steps=2, max_grad_norm=0.0, seed=3)
        transformers.hybrid(whole, run=plan())
        whole.train()
        resumed = trainer_of(save_steps=2, max_grad_norm=0.0, restore_callback_states_from_checkpoint=restores)
        applied = transformers.hybrid(resumed, run=plan())
        resumed.train(resume_from_checkpoint="checkpoints/checkpoint-2")
        assert applied.step == 4
        assert same(resumed.model.state_dict(), whole.model.state_dict())
        stored = json.loads(Path("checkpoints/checkpoint-4/trainer_state.json").read_text())["stateful_callbacks"]
        assert stored["PlanCallback"] == {"args": {}, "attributes": {"rounding": {"step": 4, "seed": 0}}}

    def test_a_checkpoint_without_a_plan_can_be_trained_on_under_one(self):
        trainer_of(save_steps=2).train()
        resumed = trainer_of()
        transformers.hybrid(resumed, run=plan())
        with pytest.warns(UserWarning, match="the checkpoint has no rounding step.*rounding begins with that of step 0"):
            resumed.train(resume_from_checkpoint="checkpoints/checkpoint-2")

    def test_a_model_that_is_made_in_train_is_refused(self):
        arguments = TrainingArguments("checkpoints", use_cpu=True, report_to="none")
        trainer = Trainer(args=arguments, model_init=Net, train_dataset=SAMPLES)
        with pytest.raises(PlanError, match=r"makes a new model in train\(\), .* give it model=\.\.\., not model_init="):
            transformers.hybrid(trainer, run=plan())

    def test_another_model_than_the_one_with_the_plan_is_refused(self):
        trainer = trainer_of()
        transformers.hybrid(trainer, run=plan())
        trainer.model = trainer.model_wrapped = Net()
        with pytest.raises(PlanError, match=r"another model than the one that .* gave a plan: call hybrid again"):
            trainer.train()

    def test_several_gpus_in_one_process_are_refused(self):
        trainer = trainer_of()
        trainer.args._n_gpu = 2
        with pytest.raises(PlanError, match=r"nn\.DataParallel: start one process for each GPU, with torchrun"):
            transformers.hybrid(trainer, run=plan())


class TestLightning:
    def test_each_fit_has_its_own_plan(self):
        strategy = lightning.HybridStrategy(plan(), module="net")
        module = Module()
        trainer = fit(strategy, module, use_distributed_sampler=False)
        first = strategy.applied
        assert same(module.net.state_dict(), by_hand(plan()))
        trainer.fit_loop.epoch_loop.max_steps = 6
        trainer.fit(module, DataLoader(PAIRS, batch_size=4))
        assert strategy.applied is not first
        assert (first.step, strategy.applied.step) == (4, 2)

    def test_buffers_are_shared_before_they_are_evaluated_or_saved_and_at_the_end(self, shared_at):
        class Validated(Module):
            def validation_step(self, batch):
                pass

        trainer = LightningTrainer(
            strategy=lightning.HybridStrategy(plan(), module="net"),
            accelerator="cpu",
            devices=1,
            max_steps=5,
            logger=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            val_check_interval=3,
        )
        loader = DataLoader(PAIRS, batch_size=4)
        trainer.fit(Validated(), loader, loader)
        trainer.save_checkpoint("after.ckpt")
        assert shared_at == [3, 5, 5]

    def test_a_part_that_is_not_there_is_refused(self):
        with pytest.raises(PlanError, match=r"Module has no module 'body': HybridStrategy\(\.\.\., module=\.\.\.\) names one"):
            fit(lightning.HybridStrategy(plan(), module="body"))

    def test_layers_of_configure_model_and_setup_are_planned(self):
        class Late(Module):
            def __init__(self):
                LightningModule.__init__(self)
                self.net = None

            def setup(self, stage):
                self.prepared = True

            def configure_model(self):
                if self.net is None and self.prepared:
                    self.net = Net()

        module = Late()
        fit(lightning.HybridStrategy(plan(Module(), "net.")), module, use_distributed_sampler=False)
        whole = Module()
        apply_(whole, plan(Module(), "net."))
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        for batch, _ in zip(DataLoader(PAIRS, batch_size=4), range(4), strict=False):
            whole.training_step(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same(module.state_dict(), whole.state_dict())

    def test_a_checkpoint_without_a_plan_can_be_trained_on_under_one(self, tmp_path):
        from lightning.pytorch.strategies import DDPStrategy

        before = fit(DDPStrategy())
        before.save_checkpoint("before.ckpt")
        trainer = LightningTrainer(
            strategy=lightning.HybridStrategy(plan(), module="net"), accelerator="cpu", devices=1, max_steps=6, logger=False
        )
        with pytest.warns(UserWarning, match="the checkpoint has no rounding step.*rounding begins anew"):
            trainer.fit(Module(), DataLoader(PAIRS, batch_size=4), ckpt_path="before.ckpt")

    def test_ddp_has_the_options_of_plan_and_script(self):
        strategy = lightning.HybridStrategy(plan(), module="net", find_unused_parameters=True)
        seen = {}

        class Watching(Module):
            def on_train_start(self):
                wrapper = self.trainer.strategy.model
                seen.update(find=wrapper.find_unused_parameters, view=wrapper.gradient_as_bucket_view, cap=wrapper.bucket_bytes_cap)

        fit(strategy, Watching())
        assert seen == {"find": True, "view": True, "cap": int(COMMUNICATION.bucket_cap_mb * 2**20)}


REPLICATED = {"dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}


def job_config(dtype="float32", mixed="float32"):
    return SimpleNamespace(training=SimpleNamespace(dtype=dtype, mixed_precision_param=mixed))


class TestTorchtitan:
    def test_other_parallelism_is_refused(self):
        with pytest.raises(PlanError, match=r"this job has dp_shard=4, tp=2: set parallelism\.data_parallel_replicate_degree"):
            HybridConverter(plan())(job_config(), SimpleNamespace(**REPLICATED | {"dp_shard": 4, "tp": 2}))

    def test_parameters_in_16_bits_are_refused(self):
        with pytest.raises(PlanError, match=r"training\.dtype is 'bfloat16': set 'float32'"):
            HybridConverter(plan())(job_config("bfloat16", "bfloat16"), SimpleNamespace(**REPLICATED))

    def test_another_autocast_is_refused(self):
        converter = HybridConverter(plan())(job_config(mixed="bfloat16"), SimpleNamespace(**REPLICATED))
        with pytest.raises(PlanError, match=r"without autocast: set training\.mixed_precision_param = 'float32', or plan"):
            converter.convert(Net())

    def test_a_plan_that_needs_loss_scaling_is_refused_and_the_model_is_as_it_was(self):
        model = Net()
        with pytest.raises(
            PlanError, match=r"gradients of group infer pass through float16 .*, which torchtitan does not have: plan"
        ):
            HybridConverter(plan(scaling=True)).convert(model)
        assert "forward" not in vars(model)

    def test_a_checkpoint_before_the_model_is_refused(self):
        with pytest.raises(PlanError, match=r"no plan is in force yet: name this converter in the job's model\.converters"):
            HybridConverter(plan()).state_dict()


def test_losses_are_scaled_where_the_plan_needs_it_and_nowhere_else():
    for scaling in (False, True):
        accelerator = Accelerator(cpu=True)
        hybrid_accelerator(accelerator, Net(), plan(scaling=scaling))
        assert isinstance(accelerator.scaler, InStepGradScaler) == scaling
        strategy = lightning.HybridStrategy(plan(scaling=scaling), module="net")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(strategy)
        assert isinstance(getattr(strategy.precision_plugin, "scaler", None), InStepGradScaler) == scaling
        AcceleratorState._reset_state(reset_partial_state=True)
