"""The operations as C++ for CPUs, compiled once for the machine at first use.

It must not know more than the contract says; the reference kernels stay the specification.
"""

from engine.attention.cpu.build import BuildError
from engine.attention.cpu.kernels import CpuKernels

__all__ = ["BuildError", "CpuKernels"]
