"""pytest plugin of sanitize.sh: references are computed without cuDNN, whose convolutions make racecheck end in an error of its own."""


def pytest_configure(config):
    import torch

    torch.backends.cudnn.enabled = False
