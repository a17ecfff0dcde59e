"""Folders from which code is loaded, and those above them; the kernel cache's tests try every way of tampering."""

from __future__ import annotations

import grp
import os
import pwd

import pytest

from qsync_core.artifacts import own_folder
from qsync_core.artifacts.own_folder import make_own, why_untrusted


@pytest.mark.parametrize("mode, group, trusted", [
    (0o777, None, False), (0o775, 12345, False), (0o775, "own", True), (0o1777, None, True), (0o755, None, True),
])  # fmt: skip
def test_a_folder_below_one_that_others_can_write_is_not_trusted_unless_it_is_sticky(tmp_path, mode, group, trusted):
    above = tmp_path / "shared" / "deep"
    above.mkdir(parents=True)
    if group is not None:
        own = pwd.getpwuid(os.geteuid())
        is_private = group == "own" and grp.getgrgid(own.pw_gid).gr_name == own.pw_name
        if (group == "own" and not is_private) or (group != "own" and os.geteuid() != 0):
            pytest.skip("needs a group of the user's own, or root to give a folder to another group")
        os.chown(above.parent, -1, own.pw_gid if group == "own" else group)
    above.parent.chmod(mode)
    said = why_untrusted(make_own(above / "kernels"))
    assert said == (None if trusted else f"is below {above.parent}, which others can write (mode {mode:04o})")


@pytest.mark.parametrize("overflow, trusted", [(65534, True), (65533, False)])
def test_a_folder_above_of_a_user_that_the_container_does_not_know_is_the_machines(tmp_path, monkeypatch, overflow, trusted):
    (tmp_path / "overflowuid").write_text(f"{overflow}\n")
    (tmp_path / "uid_map").write_text("         0       1000          1\n")
    names = {"/proc/sys/kernel/overflowuid": tmp_path / "overflowuid", "/proc/self/uid_map": tmp_path / "uid_map"}
    monkeypatch.setattr(own_folder, "Path", lambda name: names[name])
    assert own_folder._is_unmapped(65534) is trusted


def test_folders_that_are_made_are_the_owners_whatever_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        assert make_own(tmp_path / "qsync" / "kernels").is_dir()
    finally:
        os.umask(before)
    assert (tmp_path / "qsync").stat().st_mode & 0o777 == 0o700
