"""Every wheel, installed alone into a clean environment with what it declares and nothing else, is of use."""

from __future__ import annotations

import json
import tomllib
import zipfile

import pytest

from contracts.environment import MODULES, ROOT, run, run_python
from nightly import nightly_but

HEAVY = {"torch", "numpy", "triton", "transformers", "scipy", "scikit-learn", "nvidia-cutlass"}
BRINGS = {
    "qsync-core": set(),
    "qsync-planner": {"numpy"},
    "qsync-torch": {"torch", "numpy"},
    "qsync-kernels-triton": set(),
    "qsync-kernels-cutlass": set(),
}
COMMANDS = {
    "qsync-core": {"doctor", "backends", "launch", "show"},
    "qsync-planner": {"indicate", "plan", "replay", "explain", "verify"},
    "qsync-torch": {"prepare", "trace", "profile", "observe", "demo"},
    "qsync-kernels-triton": set(),
    "qsync-kernels-cutlass": set(),
}


def test_the_tables_of_this_file_name_every_package():
    assert set(BRINGS) == set(COMMANDS) == set(MODULES)


@pytest.mark.parametrize("distribution", nightly_but({"qsync-core", "qsync-planner"}, MODULES))
@pytest.mark.slow
def test_a_wheel_installed_alone_brings_what_it_declares_and_works(distribution, make_venv):
    venv = make_venv(distribution)
    venv.install(distribution)
    installed = venv.installed()
    assert installed & HEAVY == BRINGS[distribution]
    assert {name for name in installed if name.startswith("qsync")} == {distribution, "qsync-core"}

    module = MODULES[distribution]
    version = tomllib.loads((ROOT / "packages" / distribution / "pyproject.toml").read_text())["project"]["version"]
    done = run_python(f"import {module}; print({module}.__version__)", python=venv.python)
    assert (done.returncode, done.stdout.strip()) == (0, version), done.stderr

    helped = venv.qsync("--help")
    assert helped.returncode == 0, helped.stderr
    offered = {line.split()[0] for line in helped.stdout.split("Commands:")[1].splitlines() if line.strip()}
    assert COMMANDS["qsync-core"] | COMMANDS[distribution] <= offered
    foreign = set().union(*(COMMANDS[name] for name in MODULES if name not in (distribution, "qsync-core")))
    assert not foreign & offered

    by_module = run(venv.python, "-m", "qsync", "--help", cwd=venv.folder)
    assert (by_module.returncode, by_module.stdout) == (0, helped.stdout)

    doctor = venv.qsync("doctor", "--json")
    assert doctor.returncode == 0, doctor.stderr
    assert json.loads(doctor.stdout)
    for command in sorted(COMMANDS[distribution]):
        done = venv.qsync(command, "--help")
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_the_module_that_is_only_a_command_says_what_scripts_import():
    done = run_python("import qsync; qsync.apply_")
    assert done.returncode == 1
    assert "module 'qsync' has no 'apply_': it is only the command; in a script write 'import qsync_torch as qsync'" in done.stderr


def test_the_wheel_carries_its_type_marker_and_no_tests(wheelhouse):
    for distribution, module in MODULES.items():
        (wheel,) = wheelhouse.glob(f"{module}-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert f"{module}/py.typed" in names
        assert not [name for name in names if "test" in name.split("/")[1]], distribution
