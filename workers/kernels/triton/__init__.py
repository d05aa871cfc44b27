"""CUDA kernels written in Triton, each beside the function that launches it. Imported only where a GPU is used.

Kernels are plain `triton.jit` functions with their sizes chosen in Python (`workers.kernels.triton.tuning`): no
autotuning, so that a launch never measures, never waits for the device, and can be captured in a CUDA graph. Every
arithmetic operation is in float32 whatever the tensors are; only the operands of matrix products keep the tensors'
type.

Lengths, counts and the index tensors of a step are not specialised on: their values and alignment change from step to
step, and every combination would be compiled anew while requests wait.
"""
