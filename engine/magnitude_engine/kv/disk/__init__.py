"""The disk tier of the key-value cache."""

from __future__ import annotations

from magnitude_engine.kv.disk.reader import ReadTicket
from magnitude_engine.kv.disk.shelf import DiskOptions
from magnitude_engine.kv.disk.tier import DiskStats, DiskTier

__all__ = ["DiskOptions", "DiskStats", "DiskTier", "ReadTicket"]
