"""The ops on a CPU. Each op has two forms.

The eager form branches on data: it does not read rows after the first rejection, and it computes a residual only for
sequences that need one. The dense form is plain torch without loops over data and without data-dependent shapes.
Inductor traces and fuses it, and eager calls use it for large batches of short rows. Both forms use the accept rule
`walk.accepts`.

Symbols as in docs/math.md: p is the target's distribution, q is the draft's, x are the draft tokens, and z are logits
divided by the temperature. Logits are scaled and exponentiated in float32. Sums, cumulative distributions and the few
probabilities that decide an acceptance are float64. `reference.py` defines the results.
"""
