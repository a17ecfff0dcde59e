"""Folders that are the user's alone, from which code is loaded: no one else can write there, or put another in their place."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_own(folder: Path) -> Path:
    """Make a folder, and those above it, with mode 0700 where they are missing: not even with a umask that lets a group write.

    Returns:
        Where it lies.  Links are followed once, here: what they point to later does not matter.

    Raises:
        OSError: when it cannot be made.
    """
    folder = folder.expanduser().resolve()
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
    return folder


def why_untrusted(folder: Path) -> str | None:
    """Why what lies in a folder may be another user's, as the rest of a sentence that begins with the folder.

    Args:
        folder: without links, as :func:`make_own` gives it.

    Returns:
        None where it is the user's own and closed to others' writing, and no one else can exchange one of those above it.
    """
    if problem := distrust(folder, stat.S_IFDIR):
        return problem
    for parent in folder.parents:
        if problem := _lets_others_rename(parent):
            return f"is below {parent}, which {problem}"
    return None


def distrust(path: Path, kind: int) -> str | None:
    """Why a path itself is not to be trusted, as the rest of a sentence that begins with it.

    Args:
        kind: ``stat.S_IFDIR`` or ``stat.S_IFREG``.

    Returns:
        None where it is of its kind (no link), the user's own, and not writable by others.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return "does not exist"
    if stat.S_IFMT(found.st_mode) != kind:
        return "is not a folder" if kind == stat.S_IFDIR else "is not a plain file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid} and not to you (user {os.geteuid()})"
    if found.st_mode & _WRITABLE_BY_OTHERS:
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _lets_others_rename(parent: Path) -> str | None:
    """Say why others may exchange what is in a folder; None where it is the user's or the system's, and closed or sticky."""
    try:
        found = os.lstat(parent)
    except OSError:
        return "does not exist"
    if found.st_uid not in (os.geteuid(), 0) and not _is_unmapped(found.st_uid):
        return f"belongs to user {found.st_uid}"
    writable = found.st_mode & (stat.S_IWOTH if _is_private(found.st_gid) else _WRITABLE_BY_OTHERS)
    if writable and not found.st_mode & stat.S_ISVTX:
        return f"others can write (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _is_private(group: int) -> bool:
    """Whether a group is the user's own, as systems make one with each user, whose umask then lets it write."""
    try:
        name, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def _is_unmapped(user: int) -> bool:
    """Whether a number stands for users that this container does not know: folders of its machine's root show it."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return user == overflow and not any(first <= user < first + count for first, _, count in mapped)
