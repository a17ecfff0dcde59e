"""The table: for every operator that a backend may offer, the calls that each check is put to."""

from __future__ import annotations

from qsync_torch.conformance import producer_entries, product_entries, quantization_entries, stored
from qsync_torch.conformance.calls import Entry

TABLE: dict[str, Entry] = quantization_entries.ENTRIES | stored.ENTRIES | product_entries.ENTRIES | producer_entries.ENTRIES
"""Entries by the names of their operators."""
