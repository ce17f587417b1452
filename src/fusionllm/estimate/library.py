"""Known devices: what their makers publish, for planning machines one does not hold.

Pure data. Peaks are dense rates without sparsity; ``half`` is fp16 or bf16 on tensor cores with fp32 accumulation.
Sources: NVIDIA's architecture whitepapers (Turing, Ampere GA102, Ada) for the GeForce and RTX cards, and NVIDIA's
product datasheets for V100, T4, A10, L4, A100 and H100; a CPU core from its vector width, two fused multiply-adds a
cycle. A device reaches part of its peak: the shares below are ASSUMPTIONS until a calibration replaces them.
"""

from __future__ import annotations

import msgspec

from fusionllm.estimate.device import DeviceRates

#: Assumed parts of the peaks that training reaches: transformer products and attention, convolutions, memory.
LAMBDA = 0.45
LAMBDA_CONVOLUTION = 0.22
LAMBDA_MEMORY = 0.8
#: In fp32 the arithmetic is the bottleneck more often, so a larger part is reached.
FP32_BONUS = 1.6
#: Seconds from one operator to the next in an eager framework, assumed.
LAUNCH_S = 8e-6
#: Of a device's memory a job may use this part, less what the framework takes itself.
USABLE_MEMORY = 0.92
FRAMEWORK_BYTES = 1e9


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device as published: FLOPs per second in fp32 and half, bytes of memory, bytes per second of it."""

    fp32: float
    half: float
    memory_bytes: float
    bytes_per_s: float

    def peak(self, precision: str) -> float:
        """FLOPs per second in ``"float32"`` or ``"bfloat16"``."""
        return self.fp32 if precision == "float32" else self.half

    def rates(self, precision: str = "bfloat16") -> DeviceRates:
        """Assumed achieved rates."""
        peak, bonus = self.peak(precision), FP32_BONUS if precision == "float32" else 1.0
        return DeviceRates(
            matmul=peak * LAMBDA * bonus,
            attention=peak * LAMBDA * bonus,
            convolution=peak * LAMBDA_CONVOLUTION * bonus,
            bytes_per_s=self.bytes_per_s * LAMBDA_MEMORY,
            launch_s=LAUNCH_S,
        )

    @property
    def usable_bytes(self) -> float:
        return max(self.memory_bytes * USABLE_MEMORY - FRAMEWORK_BYTES, 0.5 * self.memory_bytes)


def _spec(fp32_tflops: float, half_tflops: float, memory_gb: float, memory_gb_per_s: float) -> DeviceSpec:
    return DeviceSpec(fp32_tflops * 1e12, half_tflops * 1e12, memory_gb * 1e9, memory_gb_per_s * 1e9)


DEVICES: dict[str, DeviceSpec] = {
    # GeForce and RTX: Turing, Ampere GA102 and Ada whitepapers
    "RTX 2080 Ti": _spec(13.4, 53.8, 11, 616),
    "RTX 3060": _spec(12.7, 25.5, 12, 360),
    "RTX 3080": _spec(29.8, 59.5, 10, 760),
    "RTX 3090": _spec(35.6, 71.0, 24, 936),
    "RTX 4070 Ti": _spec(40.1, 80.2, 12, 504),
    "RTX 4080": _spec(48.7, 97.5, 16, 717),
    "RTX 4090": _spec(82.6, 165.2, 24, 1008),
    "RTX A6000": _spec(38.7, 154.8, 48, 768),
    # data centre: product datasheets
    "T4": _spec(8.1, 65.0, 16, 320),
    "V100": _spec(15.7, 125.0, 32, 900),
    "A10": _spec(31.2, 125.0, 24, 600),
    "L4": _spec(30.3, 121.0, 24, 300),
    "A100 40GB": _spec(19.5, 312.0, 40, 1555),
    "A100 80GB": _spec(19.5, 312.0, 80, 2039),
    "H100": _spec(67.0, 989.0, 80, 3350),
    # 8 cores at 3 GHz: 8 lanes (AVX2) or 16 (AVX-512), two fused multiply-adds; two or four channels of DDR4-3200
    "CPU 8 cores AVX2": _spec(0.77, 0.77, 16, 51),
    "CPU 8 cores AVX-512": _spec(1.54, 1.54, 32, 102),
}


def known_rates(precision: str = "bfloat16") -> dict[str, DeviceRates]:
    """Assumed achieved rates of all devices here, by name."""
    return {name: device.rates(precision) for name, device in DEVICES.items()}
