"""Importing is light: no torch where none is declared, none from a plugin module, and never a CUDA initialisation."""

from __future__ import annotations

import pytest

from contracts.environment import MODULES, run_python

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError("blocked for this test: " + name)
sys.meta_path.insert(0, Block())
"""
IMPORT_ALL = """
import importlib, pkgutil
package = importlib.import_module("{module}")
for found in pkgutil.walk_packages(package.__path__, "{module}."):
    if not found.name.endswith("__main__") and not found.name.startswith("{module}.{torch_only}"):
        importlib.import_module(found.name)
"""


@pytest.mark.parametrize(
    ("module", "torch_only", "blocked"),
    [
        ("qsync_core", "-", ("torch", "numpy", "triton", "transformers", "sklearn", "highspy", "qsync_planner", "qsync_torch")),
        ("qsync_planner", "-", ("torch", "triton", "transformers", "sklearn", "highspy", "jinja2", "vl_convert", "qsync_torch")),
        ("qsync_kernels_cutlass", "kernels", ("torch", "triton", "cutlass", "numpy", "qsync_planner", "qsync_torch")),
    ],
)
def test_every_module_imports_without_what_the_package_does_not_need(module, torch_only, blocked):
    """``torch_only``: the subpackage that ``build`` imports, which runs kernels on tensors."""
    done = run_python(BLOCK.format(blocked=blocked) + IMPORT_ALL.format(module=module, torch_only=torch_only))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [name for name in MODULES.values() if name != "qsync_core"])
def test_a_plugin_module_imports_without_torch(module):
    blocked = ("torch", "triton", "transformers", "sklearn")
    done = run_python(BLOCK.format(blocked=blocked) + f"import {module}.plugin")
    assert done.returncode == 0, done.stderr


def test_the_command_and_its_help_do_not_import_torch():
    code = """
import sys
from qsync_core.cli.root import cli
cli(["--help"], standalone_mode=False)
print("loaded:", sorted({"torch", "triton", "transformers", "sklearn"} & set(sys.modules)))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_importing_never_asks_cuda_for_anything():
    """Even asking for the device count starts the driver and breaks a later fork; so no function that does may be called.

    Adapters for trainers import their trainer, which is not installed here and may do as it likes.
    The kernels of qsync-kernels-triton are imported under the same watch by its own tests, where triton is installed.
    """
    code = """
import torch, traceback
asked = []
def watch(name):
    def refuse(*args, **kwargs):
        asked.append(name + "\\n" + "".join(traceback.format_stack(limit=12)))
        raise RuntimeError(name + " was called while importing")
    return refuse
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_capability", "set_device"):
    setattr(torch.cuda, name, watch(name))
IMPORT_ALL
assert not torch.cuda.is_initialized()
assert not asked, asked[0]
"""
    done = run_python(code.replace("IMPORT_ALL", IMPORT_ALL.format(module="qsync_torch", torch_only="integrations")))
    assert done.returncode == 0, done.stderr
