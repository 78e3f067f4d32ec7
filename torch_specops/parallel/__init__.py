"""Verification and sampling on logits that are sharded over the vocabulary, as tensor-parallel heads produce them.

Every rank of a process group holds some columns of the logits, which never leave it. A call makes a fixed number of
all-gathers of a few numbers per row, three in `verify_exact` and two in `sample`; docs/design.md says what they
contain, and `wire_bytes` counts the bytes. All other arguments (draft tokens, uniforms, temperature, draft_lse) must be
equal on all ranks; `check_ranks=True` checks this. The functions trace with `torch.compile(fullgraph=True)`.
"""

from .exact import verify_exact
from .exchange import wire_bytes
from .sample import sample
from .shards import shard_sizes

__all__ = ["sample", "shard_sizes", "verify_exact", "wire_bytes"]
