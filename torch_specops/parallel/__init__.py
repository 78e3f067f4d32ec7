"""Verification and sampling on logits that are sharded over the vocabulary, as tensor-parallel heads leave them.

Every rank of a process group holds some columns of the logits. A call makes a fixed number of all-gathers of a few
numbers per row, three in `verify_exact` and two in `sample`, and logits never leave their rank:

1. Each rank sends the maximum of each of its rows, the sum of exp(z - maximum), the argmax where rows may be greedy,
   and the logit of the draft token if it holds it. From these every rank has p and q of the draft tokens and walks.
2. In `verify_exact` each rank sends the mass of the residual and of p in its columns of row n. So all know which shard
   the next token lies in, and how far inside.
3. That shard's rank draws it. What the op returns is read from this last exchange, so that it is the same on every
   rank bit for bit.

`wire_bytes` counts the bytes. What the ranks share besides logits (draft tokens, uniforms, temperature, draft_lse) must
be equal on all of them; `check_ranks=True` looks. The functions trace with `torch.compile(fullgraph=True)`: they are
plain torch and functional collectives.
"""

from .exact import verify_exact
from .sample import sample
from .shards import shard_sizes
from .wire import wire_bytes

__all__ = ["sample", "shard_sizes", "verify_exact", "wire_bytes"]
