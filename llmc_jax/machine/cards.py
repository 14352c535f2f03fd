"""Graphics cards as they are rented: the memory that CUDA finds, and links.

A card has a row in three tables, by the name that the driver reports: its peaks (gpus.GPUS), what a compiler must know
(gpus.TARGETS) and what is here. `named` finds one by any name. Leaves out prices (plan/prices.toml). Knows no JAX.
"""

from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.machine.gpus import MIB, TARGETS, Target

GIB = 2**30


class Card(NamedTuple):
    """What a plan must know of a card beside its peaks."""

    memory: int  # bytes in all that CUDA finds (cuMemGetInfo): JAX's allocator takes its share of these
    link: float  # bytes/s in one direction from one GPU to the others of its machine, as the link is sold
    link_name: str

    @property
    def nvlink(self) -> bool:
        """Return whether its GPUs have a link of their own: any that is faster than PCIe."""
        return self.link > PCIE5


# Memory. CUDA finds 0.5 to 1.5 % less than nvidia-smi shows, and drivers differ by 0.1 %. Bytes where a source prints
# them, else GiB to two digits, from the message of a full memory ("GPU 0 has a total capacity of 31.36 GiB").
#   H100 SXM and PCIe   openxla/xla:xla/backends/gpu/target_config/specs/h100_sxm.txtpb, h100_pcie.txtpb: 84942979072
#                       (nvidia-smi: 81559 MiB, wilicc/gpu-burn#114)
#   H200                139.80 and 139.81 GiB in several logs (one of 139.72); nvidia-smi: 143771 MiB. XLA's h200.txtpb
#                       has 141 GiB, which is the size as sold and not what a driver says
#   B200                XLA's b200.txtpb: 191514411008 (nvidia-smi: 183359 MiB, NVIDIA/TensorRT-LLM#10278)
#   A100 80 GB SXM      XLA's a100_sxm_80.txtpb: 85100068864. PCIe: taken to be the same, no source of its own (XLA's
#                       a100_pcie_80.txtpb has 79050250240, which no log of a free card agrees with)
#   A100 40 GB          deviceQuery in bottlerocket-os/bottlerocket#3873: 42298834944
#   RTX A6000           XLA's a6000.txtpb: 51041271808, ECC off as delivered
#   L40S                44.39 and 44.40 GiB in several logs, ECC on as delivered (nvidia-smi: 46068 MiB)
#   RTX PRO 6000        94.97 GiB in several logs
#   RTX 3090            24259 MiB in a log that names the card (23.70 GiB in GaoLii/DSP#10)
#   RTX 4090            23.64 GiB (TMElyralab/MuseTalk#76, 3DTopia/Phidias-Diffusion#8; others have 23.61 to 23.68)
#   RTX 5090            31.36 GiB in several logs (nvidia-smi: 32607 MiB, noonghunna/club-3090#1253)
# Links: NVLink as the datasheets have it, halved to one direction: 600 GB/s (A100), 900 (H100, H200), 1800 (B200).
# PCIe x16 by the standard: 16 or 32 GT/s per lane less 128b/130b. A bridge over two PCIe cards is left out. GeForce
# cards since the RTX 4090 do not read one another's memory, so what they send goes through the host's.
NVLINK3, NVLINK4, NVLINK5 = 300e9, 450e9, 900e9
PCIE4, PCIE5 = 31.5e9, 63.0e9
CARDS = {
    "NVIDIA H200": Card(int(139.8 * GIB), NVLINK4, "NVLink 4"),
    "NVIDIA H100 80GB HBM3": Card(84_942_979_072, NVLINK4, "NVLink 4"),
    "NVIDIA H100 PCIe": Card(84_942_979_072, PCIE5, "PCIe 5.0 x16"),
    "NVIDIA B200": Card(191_514_411_008, NVLINK5, "NVLink 5"),
    "NVIDIA A100-SXM4-80GB": Card(85_100_068_864, NVLINK3, "NVLink 3"),
    "NVIDIA A100-SXM4-40GB": Card(42_298_834_944, NVLINK3, "NVLink 3"),
    "NVIDIA A100 80GB PCIe": Card(85_100_068_864, PCIE4, "PCIe 4.0 x16"),
    "NVIDIA GeForce RTX 3090": Card(24_259 * MIB, PCIE4, "PCIe 4.0 x16"),
    "NVIDIA GeForce RTX 4090": Card(int(23.64 * GIB), PCIE4, "PCIe 4.0 x16, through the host"),
    "NVIDIA GeForce RTX 5090": Card(int(31.36 * GIB), PCIE5, "PCIe 5.0 x16, through the host"),
    "NVIDIA RTX A6000": Card(51_041_271_808, PCIE4, "PCIe 4.0 x16"),
    "NVIDIA L40S": Card(int(44.39 * GIB), PCIE4, "PCIe 4.0 x16"),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": Card(int(94.97 * GIB), PCIE5, "PCIe 5.0 x16"),
}


def named(name: str) -> Target:
    """Return a GPU by its short name or the driver's, in any case. Raises InputError for one that is not known."""
    found = {_plain(word): target for short, target in TARGETS.items() for word in (short, target.device_kind)}
    if _plain(name) in found:
        return found[_plain(name)]
    raise InputError(f"GPU {name!r} is not known here: take one of {', '.join(TARGETS)}")


def name_of(kind: str) -> str | None:
    """Return the key of TARGETS of a GPU by the driver's name; None for one that is not there."""
    return next((short for short, each in TARGETS.items() if each.device_kind == kind), None)


def _plain(name: str) -> str:
    """Return a name without what people write differently: case, spaces and hyphens."""
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")
