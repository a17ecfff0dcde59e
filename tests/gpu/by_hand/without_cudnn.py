"""pytest plugin of sanitize.sh: references do without cuDNN, on whose convolutions racecheck ends in an error of its own."""


def pytest_configure(config):
    import torch

    torch.backends.cudnn.enabled = False
