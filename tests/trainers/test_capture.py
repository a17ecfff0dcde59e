"""Under ``qsync prepare`` the same scripts say what they train, and end there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from digits_net import load_data, make_model
from launching import HERE, ROOT, scripts_of_the_page
from plain_ddp import bert
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from forked import Forked
from qsync_core.errors import JobError
from qsync_torch.capturing import script as capturing
from qsync_torch.integrations.torchtitan import HybridConverter

DIGITS = ["conv1#0", "conv2#0", "conv3#0", "fc#0"]
SGD = "torch.optim.sgd.SGD(66154 parameters: dampening=0, "


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """By script, what ``captured_job.py`` says of its job; the scripts run side by side, each without torchrun."""
    folder = tmp_path_factory.mktemp("captured")
    paths = [str(ROOT / "examples"), str(HERE), os.environ.get("PYTHONPATH", "")]
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
    environment = os.environ | cpu | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    running = {}
    for name, text in scripts_of_the_page().items():
        text = text.replace("Accelerator()", "Accelerator(gradient_accumulation_steps=3)")
        (folder / name).write_text(text.replace("max_epochs=2", "max_epochs=2, accumulate_grad_batches=4"))
        running[name] = Forked([str(HERE / "captured_job.py"), name], cwd=folder, env=environment)
    found = {}
    for name, process in running.items():
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        found[name] = json.loads(out.splitlines()[-1])
    assert not list(Path(folder).glob("trained*"))  # no loop was reached
    return found


def test_accelerate(captured):
    found = captured["train_accelerate.py"]
    assert found["line"] == "hybrid(accelerator, ..., run='run')"
    images, labels = load_data()[0].tensors
    assert (found["name"], found["batch_size"], found["accumulate"], found["operators"]) == ("DigitsNet", 16, 3, DIGITS)
    assert not found["reads_loss"]
    assert found["optimizer"].startswith(SGD)
    assert found["loss"] == cross_entropy(make_model()(images[:16]), labels[:16]).item()


def test_hugging_faces_trainer(captured):
    found, model = captured["train_transformers.py"], bert()
    assert found["line"].replace("'", '"') in scripts_of_the_page()["train_transformers.py"]
    pixels, labels = load_digits(return_X_y=True)
    assert (found["name"], found["batch_size"], found["accumulate"]) == ("BertForSequenceClassification", 8, 2)
    assert found["reads_loss"]  # in its filter of losses that are not finite
    assert found["operators"] == [f"{name}#0" for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    assert found["optimizer"].startswith("torch.optim.adamw.AdamW(")
    assert found["loss"] == model(torch.tensor(pixels[:8]).long(), labels=torch.tensor(labels[:8])).loss.item()


@pytest.mark.parametrize("every", [1, 2])
def test_hugging_faces_trainer_checkpoints_layers_only_in_train(own_process, monkeypatch, tmp_path, every):
    """What is measured is the step of ``train()``, which runs the forward of a checkpointed layer twice."""
    from transformers import Trainer, TrainingArguments

    from qsync_torch.integrations import transformers

    def keep(job, caller):
        jobs.append(job)
        raise capturing.LineReached

    jobs, calls = [], []
    monkeypatch.setattr(transformers, "is_wanted", lambda: True)
    monkeypatch.setattr(transformers, "hand_over", keep)
    options = {"gradient_checkpointing_kwargs": {"every_n_layers": every, "use_reentrant": False}, "report_to": "none"}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, gradient_checkpointing=True, **options)
    digits = [{"input_ids": torch.zeros(64, dtype=torch.long), "labels": torch.tensor(0)}] * 8
    with pytest.raises(capturing.LineReached):
        transformers.hybrid(Trainer(bert(), arguments, train_dataset=digits))
    (job,) = jobs
    model = job.copy_model().train()
    for index, layer in enumerate(model.bert.encoder.layer):
        layer.attention.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    job.compute_loss(job.batch(0, 2), model).backward()
    assert sorted(calls) == ([0, 0, 1, 1] if every == 1 else [0, 0, 1])


def test_lightning(captured):
    found = captured["train_lightning.py"]
    assert found["line"].replace("'", '"') in scripts_of_the_page()["train_lightning.py"]
    assert (found["name"], found["batch_size"], found["accumulate"]) == ("Digits", 16, 4)
    assert found["operators"] == [f"net.{name}" for name in DIGITS]
    assert found["optimizer"].startswith(SGD)
    # Lightning shuffles; a copy of the captured module gives the loss of its own step.
    assert found["loss"] == found["loss_by_hand"]


def test_torchtitan_gives_no_job(monkeypatch):
    monkeypatch.setattr("qsync_torch.integrations.torchtitan.is_wanted", lambda: True)
    with pytest.raises(JobError, match=r"torchtitan gives its converters the model alone.*write a job function"):
        HybridConverter("run").convert(make_model())


class TestWhatLightningCannotSay:
    @pytest.fixture(autouse=True)
    def preparing(self, own_process, monkeypatch):
        monkeypatch.setattr("qsync_torch.integrations.lightning.is_wanted", lambda: True)
        monkeypatch.setattr("qsync_torch.integrations.lightning.hand_over", self.keep)

    def keep(self, job, caller):
        self.job = job
        raise capturing.LineReached

    def fit(self, trained, **options):
        from lightning.pytorch import Trainer
        from torch.utils.data import DataLoader

        from qsync_torch.integrations.lightning import HybridStrategy

        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
        trainer = Trainer(strategy=HybridStrategy(**options), accelerator="cpu", devices=1, max_steps=1, **quiet)
        trainer.fit(trained, DataLoader(load_data()[0], batch_size=4))

    def module(self, **attributes):
        from lightning.pytorch import LightningModule

        class Digits(LightningModule):
            def __init__(self):
                super().__init__()
                self.net = make_model()
                vars(self).update(attributes)

            def forward(self, images):
                return self.net(images)

            def training_step(self, batch):
                loss = cross_entropy(self(batch[0]), batch[1])
                self.log("loss", loss)
                return {"loss": loss}

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Digits()

    def test_a_module_whose_step_calls_itself_and_logs_is_captured(self):
        from qsync_torch.tracing.trace import trace

        with pytest.raises(capturing.LineReached):
            self.fit(self.module())
        assert [str(operator.op_id) for operator in trace(self.job).adjustable] == [f"net.{name}" for name in DIGITS]
        batch = self.job.batch(0, 4)
        images, labels = batch.args[0]
        copied = self.job.copy_model()
        assert self.job.compute_loss(batch, copied).item() == cross_entropy(make_model()(images), labels).item()

    def test_a_part_of_the_module(self):
        with pytest.raises(JobError, match=r"plans the whole training_step of Digits, .* leave module='net' out of HybridStrategy"):
            self.fit(self.module(), module="net")

    def test_a_module_that_optimizes_by_hand(self):
        with pytest.raises(JobError, match="Digits optimizes by hand, or with several optimizers, and a job has one: write a job"):
            self.fit(self.module(_automatic_optimization=False))
