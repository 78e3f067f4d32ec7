"""Verification and sampling on logits that are sharded over the vocabulary, as tensor-parallel heads leave them.

Every rank of a process group holds some columns of the logits, which never leave it. A call makes a fixed number of
all-gathers of a few numbers per row, three in `verify_exact` and two in `sample`: docs/design.md says of what, and
`wire_bytes` counts the bytes. What the ranks share besides logits (draft tokens, uniforms, temperature, draft_lse) must
be equal on all of them; `check_ranks=True` looks. The functions trace with `torch.compile(fullgraph=True)`.
"""

from .exact import verify_exact
from .exchange import wire_bytes
from .sample import sample
from .shards import shard_sizes

__all__ = ["sample", "shard_sizes", "verify_exact", "wire_bytes"]
