"""Which device of this machine a node computes on."""

from __future__ import annotations

import torch

from fusionllm.errors import UserError


def list_devices() -> list[str]:
    """Devices torch can use here, the best first, ``cpu`` last."""
    found = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        found += [f"xpu:{i}" for i in range(xpu.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def choose_device(wish: str) -> str:
    """The device for ``auto`` (the best), a kind (``cuda``: its first) or a name (``cuda:1``). Raises UserError."""
    if wish == "cpu":  # without waking the drivers of the others
        return wish
    devices = list_devices()
    if wish == "auto":
        return devices[0]
    for device in devices:
        if wish in (device, device.partition(":")[0]):
            return device
    raise UserError(f"device {wish!r} is not here; this machine has {', '.join(devices)}, or choose auto")
