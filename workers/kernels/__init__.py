"""Hand-written kernels. Each device has a package here, and every kernel has a PyTorch counterpart that tests it."""
