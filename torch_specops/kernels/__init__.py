"""Triton kernels and their launchers. Imported by `ops.py` when a CUDA tensor arrives, never before."""
