"""Known devices: what their makers publish, for planning machines one does not hold.

Pure data. Peaks are dense rates without sparsity; ``half`` is fp16 or bf16 on tensor cores with fp32 accumulation.
The numbers are those of NVIDIA's whitepapers and datasheets as the pages beside them quote them; a test computes each
again from multiprocessors, clocks and memory pins. A device reaches part of its peak: the shares below are ASSUMPTIONS
until a calibration replaces them.
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


#: Beside each: where its numbers were read, in the order fp32, half, memory's rate; "SMs" where half was only computed.
DEVICES: dict[str, DeviceSpec] = {
    # GeForce and RTX. GeForce cards accumulate in fp32 at half the rate that their boxes name.
    "RTX 2080": _spec(10.1, 40.3, 8, 448),  # UNVERIFIED, computed as the one below: 46 SMs at 1.71 GHz
    "RTX 2080 Ti": _spec(13.4, 53.8, 11, 616),  # gpu.spicedreamphone.com/ru/gpu/nvidia/geforce-rtx-2080-ti; SMs
    "RTX 3060": _spec(12.7, 25.5, 12, 360),  # sysrqmts.com, nvidia-geforce-rtx-3060-vs-nvidia-rtx-a6000; SMs
    "RTX 3080": _spec(29.8, 59.5, 10, 760),  # spearblade.com/rtx-2080-ti-teraflops; SMs; monsterpc-sg.com, 3080 review
    "RTX 3090": _spec(35.6, 71.0, 24, 936),  # holynerdvana.blogspot.com/2022/10; ctc.archdevil.net/blog/23 (71.2)
    "RTX 4070 Ti": _spec(40.1, 80.2, 12, 504),  # fpsbench.com, amd-radeon-540-vs-nvidia-geforce-rtx-4070-ti; SMs
    "RTX 4080": _spec(48.7, 97.5, 16, 717),  # cputronic.com/gpu/nvidia-geforce-rtx-4080; ctc.archdevil.net/blog/23
    "RTX 4090": _spec(82.6, 165.2, 24, 1008),  # waredb.com/processor/nvidia-geforce-rtx-4090
    "RTX A6000": _spec(38.7, 154.8, 48, 768),  # sysrqmts.com, nvidia-geforce-rtx-3060-vs-nvidia-rtx-a6000; SMs
    # data centre: as the product datasheets are quoted
    "T4": _spec(8.1, 65.0, 16, 320),  # sysrqmts.com/en/gpus/nvidia/tesla/t4
    "V100": _spec(15.7, 125.0, 32, 900),  # SXM2: grokipedia.opelly.me/articles/nvidia-tesla-v100; io-tech.fi (900)
    "A10": _spec(31.2, 125.0, 24, 600),  # sysrqmts.com, nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000; SMs
    "L4": _spec(30.3, 121.0, 24, 300),  # fpsbench.com, nvidia-l4-vs-nvidia-tesla-m40; grokipedia.com, NVIDIA_L4_vs_L40S
    "A100 40GB": _spec(19.5, 312.0, 40, 1555),  # SXM4: glennklockwood.com/garden/processors/A100, which cites NVIDIA's
    "A100 80GB": _spec(19.5, 312.0, 80, 2039),  # the same
    "H100": _spec(67.0, 989.0, 80, 3350),  # SXM5: archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html
    # UNVERIFIED, computed for no machine in particular. 8 cores at 3 GHz: 8 lanes (AVX2) or 16 (AVX-512), two fused
    # multiply-adds a cycle; two or four channels of DDR4-3200
    "CPU 8 cores AVX2": _spec(0.77, 0.77, 16, 51),
    "CPU 8 cores AVX-512": _spec(1.54, 1.54, 32, 102),
}


def known_rates(precision: str = "bfloat16") -> dict[str, DeviceRates]:
    """Assumed achieved rates of all devices here, by name."""
    return {name: device.rates(precision) for name, device in DEVICES.items()}
