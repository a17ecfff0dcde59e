"""pytest plugin of sanitize.sh: appends to $SANITIZE_SEEN the names of all CUDA kernels that a run launches."""

import os

PROFILER = []


def pytest_sessionstart(session):
    import torch

    if os.environ.get("SANITIZE_SEEN") and torch.cuda.is_available():
        torch.cuda.init()
        PROFILER.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True))
        PROFILER[0].start()


def pytest_sessionfinish(session):
    if PROFILER:
        import torch

        torch.cuda.synchronize()
        PROFILER[0].stop()
        names = {event.name() for event in PROFILER[0].profiler.kineto_results.events()}
        with open(os.environ["SANITIZE_SEEN"], "a") as file:
            file.writelines(f"{name}\n" for name in sorted(names))
