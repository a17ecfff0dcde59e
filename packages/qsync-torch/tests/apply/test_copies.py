"""Copies of a model under a plan are plain models; averages, parts and other processes."""

import copy
import io
import multiprocessing
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch import apply_

from .small_models import INT8, named
from .two_layers import BOTH, TwoLayers, equal, gradients_of, step_of


def plain_copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
        "deepcopy": copy.deepcopy(model),
    }


def test_copies_are_plain_models_that_take_a_plan_of_their_own(x):
    model, twin = TwoLayers("functional"), TwoLayers("functional")
    applied = apply_(model, BOTH, seed=5)
    with pytest.warns(UserWarning, match="runs in full precision; apply the plan to it"):
        copies = plain_copies(model)
    for copied in copies.values():
        assert torch.equal(copied(x), twin(x))
        assert applied.step == 0
        handle = apply_(copied, BOTH, seed=5)
        found = gradients_of(copied, copied(x).square().sum())
        assert equal(found, step_of(TwoLayers("functional"), x))
        handle.remove()
        assert torch.equal(copied(x), twin(x))
        assert "forward" not in copied.__dict__
    assert not torch.equal(model(x), twin(x))


def test_a_copy_of_a_part_is_plain(x):
    model = TwoLayers()
    applied = apply_(model, BOTH)
    layer = copy.deepcopy(model.a)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert applied.step == 0


def test_an_average_of_weights_moves_nothing(x):
    model = TwoLayers()
    applied = apply_(model, BOTH)
    with warnings.catch_warnings(action="error"):
        average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    average(x)
    assert applied.step == 0


def _nothing(model):
    """What a spawned process would run."""


def test_a_model_under_a_plan_is_not_sent_to_another_process():
    model = TwoLayers()
    apply_(model, BOTH)
    process = multiprocessing.get_context("spawn").Process(target=_nothing, args=(model,))
    with pytest.raises(PlanError, match=r"cannot be sent to another process.*apply it in the process that trains it"):
        process.start()


def test_a_part_of_a_model_under_a_plan_takes_no_other_plan():
    model = nn.Sequential(TwoLayers(), nn.Linear(16, 2))
    apply_(model, named(**{"0.a": INT8}))
    with pytest.raises(PlanError, match="has a plan already"):
        apply_(model[0], BOTH)
    with pytest.raises(PlanError, match="module '0' of this model has a plan already"):
        apply_(nn.Sequential(model), named(**{"0.1": INT8}))


def test_a_clone_with_a_dictionary_of_its_own_runs_with_its_own_parameters():
    """As learn2learn's ``clone_module`` makes it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    outer = nn.Sequential(model)
    apply_(outer, named(**{"0.0": INT8}))
    clone = type(outer).__new__(type(outer))
    clone.__dict__ = {**outer.__dict__, "_modules": {"0": nn.Sequential(nn.Linear(16, 16))}}
    assert torch.equal(clone(x), clone._modules["0"](x))


def test_a_new_model_of_a_planned_models_class_is_plain(x):
    class Cloned(TwoLayers):
        def clone(self):
            made = type(self)(self.how)
            made.load_state_dict(self.state_dict())
            return made

    model = Cloned("functional")
    applied = apply_(model, BOTH, seed=5)
    clone, layer = model.clone(), type(model.a)(16, 3)
    assert type(clone) is Cloned
    assert type(layer) is nn.Linear
    assert torch.equal(clone(x), TwoLayers("functional")(x))
    assert layer(x).shape == (4, 3)
    apply_(clone, BOTH, seed=5)
    assert torch.equal(clone(x), model(x))
    applied.remove()
    assert type(model) is Cloned


def test_classes_of_planned_modules_are_in_no_list_of_subclasses(x):
    subclasses = []

    class Listed:
        def __init_subclass__(cls, *, name, **options):
            super().__init_subclass__(**options)
            subclasses.append((name, cls))

    class Model(TwoLayers, Listed, name="model"):
        pass

    model = Model()
    apply_(model, BOTH)
    model(x)
    assert subclasses == [("model", Model)]
