"""Quantised checkpoints: one file per format, the loader's view of them, and the matrices that stay in few bits."""
