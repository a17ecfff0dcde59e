import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
