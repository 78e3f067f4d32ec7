"""Triton kernels and their launchers, one file per op. `api.py` and `attention.py` import a file only when the op is
first called with a CUDA tensor.

The verify ops are in `exact.py`, `block.py` and `sigmoid.py`. Their accept rules are in `accept.py`. The first two
share a first kernel (`stats.py`) and the draw from the residual (`residual.py`). Device functions for the tiles of a
row are in `tiles.py`.
"""
