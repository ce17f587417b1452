"""Devices of a cluster file: those that `fusionllm calibrate` measured, by name, beside the library's.

On the path: NodeProfile -> **Device**, its ``[[device]]`` block -> CLUSTER.toml -> `sim.cluster`, `schedule.workload`.
A device of the file wins over one of the library with the same name: a measurement over a datasheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from fusionllm.errors import UserError, known_names
from fusionllm.estimate.device import DeviceRates, fit_rates
from fusionllm.estimate.library import DEVICES, LAMBDA, DeviceSpec
from fusionllm.ir.cluster import NodeProfile
from fusionllm.units import parse_num_bytes

#: Digits that are written of a measured rate.
_DIGITS = 4


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A measured device: achieved rates in float32 and, where that was measured too, in bfloat16; memory for a job."""

    name: str
    memory: str
    float32: DeviceRates
    bfloat16: DeviceRates | None = None

    def rates(self, precision: str = "bfloat16") -> DeviceRates:
        """Achieved rates; those of float32 where bfloat16 was not measured."""
        return self.float32 if precision == "float32" or self.bfloat16 is None else self.bfloat16

    def peak(self, precision: str) -> float:
        """FLOPs per second of which the paper's lambda is what matrix products were measured at."""
        return self.rates(precision).matmul / LAMBDA

    @property
    def usable_bytes(self) -> float:
        return float(parse_num_bytes(self.memory))


def measured_device(name: str, profiles: Mapping[str, NodeProfile]) -> Device:
    """What a calibration found, by precision; ``float32`` is among them. Raises UserError for what cannot be fitted."""
    fitted = {precision: _rounded(fit_rates(profile.samples)) for precision, profile in profiles.items()}
    memory_mb = int(min(profile.memory_bytes for profile in profiles.values()) / 1e6)
    device = Device(name=name, memory=f"{memory_mb} MB", **fitted)
    check_device(device, f"device {name!r}")
    return device


def _rounded(rates: DeviceRates) -> DeviceRates:
    """To some digits. A rate too fast for its samples to tell is taken to be that of matrix products."""
    values = {key: float(f"{value:.{_DIGITS}g}") for key, value in msgspec.structs.asdict(rates).items()}
    for key in ("attention", "convolution"):
        values[key] = values[key] if values[key] < math.inf else values["matmul"]
    return DeviceRates(**values)


def check_device(device: Device, where: str) -> None:
    """Rates finite and above zero, memory a size. Raises UserError."""
    for precision in ("float32", "bfloat16"):
        for key, value in msgspec.structs.asdict(device.rates(precision)).items():
            if not (0 <= value < math.inf and (value or key == "launch_s")):
                raise UserError(f"{where}.{precision}.{key} is {value}; it must be finite and above zero")
    if device.usable_bytes <= 0:
        raise UserError(f"{where}.memory is {device.memory!r}; it must be above zero, like '24 GB'")


def device_block(device: Device) -> str:
    """The device as a cluster file has it; `build_spec` reads it back."""
    lines = ["[[device]]", f'name = "{device.name}"', f'memory = "{device.memory}"']
    for precision, rates in (("float32", device.float32), ("bfloat16", device.bfloat16)):
        if rates is not None:
            values = ", ".join(f"{key} = {value!r}" for key, value in msgspec.structs.asdict(rates).items())
            lines.append(f"{precision} = {{ {values} }}")
    return "\n".join(lines) + "\n"


def known_devices(own: Iterable[Device] = ()) -> dict[str, DeviceSpec | Device]:
    """The library's and a file's own, by name."""
    return {**DEVICES, **{device.name: device for device in own}}


def find_device(name: str, known: Mapping[str, DeviceSpec | Device]) -> DeviceSpec | Device:
    """By name. Raises UserError with the nearest names."""
    if name in known:
        return known[name]
    raise UserError(
        f"device {name[:80]!r} is not known; {known_names(name, known)}. Or measure it (fusionllm calibrate), or give "
        "flops_per_s and memory"
    )
