"""What offloaded optimizer state costs: the bytes that travel per step, and the seconds that its update waits for them.

The state leaves in pieces no larger than the largest tensor, two of which are on the device during the update. Every byte
is read and written once per step.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from meshwright.cost.collective import Floats
from meshwright.cost.rates import DeviceRates
from meshwright.layout.layout import Layout

HOST_LINK: Final = 25e9
"""Bytes a second between a GPU and pinned host memory (assumed: 16 lanes of PCIe 4.0, one direction)."""
FILE_READ: Final = 3.0e9
FILE_WRITE: Final = 1.5e9
"""Bytes a second of sequential access to one rank's share of an NVMe disk (assumed)."""
CHECKSUM: Final = 1.9e9
"""Bytes a second of CRC-32 (zlib) on one core (measured here, 64 MiB at a time)."""
BUFFERS: Final = 2


def is_away(layout: Layout) -> bool:
    """Return whether the optimizer's state rests away from the device."""
    return layout.offload != "none"


def travel_seconds(layout: Layout, num_bytes: Floats, rates: DeviceRates) -> Floats:
    """Return the seconds that ``num_bytes`` of state take to come and to go back, once each."""
    if not is_away(layout):
        return np.zeros_like(num_bytes)
    if layout.offload == "optimizer":
        # a CPU copies from memory to memory, reading and writing each byte
        return 2.0 * num_bytes / HOST_LINK if rates.overlaps else 4.0 * num_bytes / rates.copy_rate
    return num_bytes * (1.0 / FILE_READ + 1.0 / FILE_WRITE + 2.0 / CHECKSUM)


def exposed_seconds(travel: Floats, update: Floats, rates: DeviceRates) -> Floats:
    """Return what of ``travel`` the update waits for: on a CPU, whose cores also copy, all of it; else the rest."""
    return np.maximum(0.0, travel - update) if rates.overlaps else travel
