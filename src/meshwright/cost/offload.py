"""What offloaded optimizer state costs: the bytes that travel per step, and the seconds that its update waits for them.

The state leaves in pieces no larger than the largest tensor, two of which are on the device during the update. Every byte
is read and written once per step.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from meshwright.cost.collective import Floats
from meshwright.cost.rates import DeviceRates

CHECKSUM: Final = 1.9e9
"""Bytes a second of CRC-32 (zlib) on one core (measured here, 64 MiB at a time)."""
BUFFERS: Final = 2


def is_away(kind: str) -> bool:
    """Return whether the optimizer's state rests away from the device under a value of the offload key."""
    return kind != "none"


def file_seconds(read: Floats, written: Floats, rates: DeviceRates) -> Floats:
    """Return the seconds of reading and of writing bytes of files, with their checksums."""
    return read * (1.0 / rates.disk_read + 1.0 / CHECKSUM) + written * (
        1.0 / rates.disk_write + 1.0 / CHECKSUM
    )


def travel_seconds(kind: str, num_bytes: Floats, rates: DeviceRates) -> Floats:
    """Return the seconds that ``num_bytes`` of optimizer state take to come and to go back, once each."""
    if not is_away(kind):
        return np.zeros_like(num_bytes)
    if kind == "optimizer":
        # a CPU copies from memory to memory, reading and writing each byte
        return 2.0 * num_bytes / rates.host_rate if rates.overlaps else 4.0 * num_bytes / rates.copy_rate
    return file_seconds(num_bytes, num_bytes, rates)


def exposed_seconds(travel: Floats, update: Floats, rates: DeviceRates) -> Floats:
    """Return what of ``travel`` the update waits for: on a CPU, whose cores also copy, all of it; else the rest."""
    return np.maximum(0.0, travel - update) if rates.overlaps else travel
