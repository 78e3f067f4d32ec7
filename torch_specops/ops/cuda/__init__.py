"""Triton kernels and their launchers, one file per op. `api.py` and `attention.py` import a file when a CUDA tensor
arrives, never before.

The verify ops (`exact.py`, `block.py`, `sigmoid.py`) accept by `accept.py`; the first two begin with `stats.py`, and
draw by `residual.py`. Device functions over the tiles of a row are in `tiles.py`.
"""
