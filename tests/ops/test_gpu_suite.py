"""The suite of GPU tests has the cases that it names."""

from __future__ import annotations

import gpu_suite
from gpu_suite import is_smoke
from op_cases import OPS
from oracle import case_names


def test_the_smoke_part_has_every_op_over_three_vocabularies() -> None:
    cases = [(op, of.vocab_size, name) for op in OPS for of in gpu_suite.ON_DEVICE for name in of.names_of(op)]
    assert sorted({(op, vocab_size) for op, vocab_size, name in cases if is_smoke(op, vocab_size, name)}) == [
        (op, vocab_size) for op in sorted(OPS) for vocab_size in (17, 1025, 50_257)
    ]


def test_every_name_in_the_suite_is_a_case() -> None:
    known = {name for op in OPS for name in case_names(op)}
    sets = (*gpu_suite.ON_DEVICE, *gpu_suite.UNDER_STAND_IN)
    assert {name for of in sets for name in (of.names or "").split()} <= known
    # Every case of every op is met where the oracle is cheap.
    assert {of.vocab_size for of in gpu_suite.ON_DEVICE if of.names is None} == {17, 1025}
