"""The ops on a CPU. Each op has two forms.

The eager form reads the data: rows after the first rejection are not read, and a residual is computed only for
sequences that need it. The dense form is plain torch without loops over data or data-dependent shapes; Inductor traces
and fuses it, and large batches of short rows take it too. Both use the accept rule `walk.accepts`.

Symbols as in docs/math.md: p is the target's distribution, q the draft's, x the draft tokens, z logits divided by the
temperature. Logits are scaled and exponentiated in float32; sums, distribution functions and the few probabilities that
decide an acceptance are float64. The law is that of `reference.py`.
"""
