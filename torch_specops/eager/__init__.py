"""The ops for eager calls on a CPU, which read the data: rows after the first rejection are not read, and a residual is
computed only for sequences that need one. The law is that of `reference.py`; what a compiler traces is in `dense/`.

Rows are read a few at a time (`rows.rows_at_a_time`), so that they stay in the cache. The walk over the drafts, and the
few numbers that decide it, are in Python.
"""

from .block import verify_block
from .exact import verify_exact
from .sample import sample
from .sigmoid import verify_sigmoid

__all__ = ["sample", "verify_block", "verify_exact", "verify_sigmoid"]
