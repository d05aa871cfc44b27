"""The CPU kernels: C++ sources, their build, and the library as Python sees it."""

from workers.kernels.cpu.library import CpuKernels, Pool, load_kernels

__all__ = ["CpuKernels", "Pool", "load_kernels"]
