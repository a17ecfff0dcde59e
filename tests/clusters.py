"""Cluster files as tests write them."""

from __future__ import annotations

import json
from collections.abc import Mapping


def cluster_text(name: str = "", link: tuple[float, float] | None = None, **groups: Mapping[str, object]) -> str:
    """A cluster file.

    Args:
        name: of the cluster.
        link: latency in µs and bandwidth in Gbit/s between the first two groups.
        groups: their fields by their names; one CPU each, which helps (``infer``) where the fields have a ladder, and trains where
            they have none, unless they say otherwise.
    """
    tables = [f"name = {json.dumps(name)}"] if name else []
    for group, fields in groups.items():
        own = {"name": group, "device": "cpu", "count": 1, "role": "infer" if "ladder" in fields else "train", **fields}
        tables.append("\n".join(["[[group]]", *(f"{field} = {json.dumps(value)}" for field, value in own.items())]))
    if link is not None:
        between = json.dumps(list(groups)[:2])
        tables.append(f"[[link]]\nbetween = {between}\nlatency_us = {link[0]}\nbandwidth_gbps = {link[1]}")
    return "\n\n".join(tables) + "\n"
