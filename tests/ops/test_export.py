"""`torch.export` keeps one op per call, and takes a whole decoding step with its caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aot_example import MAX_NEW_TOKENS, NUM_DRAFTS, PROMPTS, decode, step_state, tiny_pair, tiny_step
from marks import slow
from op_cases import OPS, VERIFY_OPS, Call, assert_equal, op_arguments, tensor_arguments
from tiny_models import padded
from torch import Tensor, nn

import torch_specops

# torch's own: its exporter copies what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


def module(op: str, **changes: Any) -> Call:
    numbers = {name: value for name, value in op_arguments(op).items() if not isinstance(value, Tensor)}
    return Call(op, **numbers | changes)


def op_nodes(program: torch.export.ExportedProgram) -> list[str]:
    return [
        str(node.target) for node in program.graph.nodes if node.op == "call_function" and "getitem" not in node.name
    ]


@pytest.mark.parametrize(
    ("op", "filtered", "strict"),
    # Strict export traces with Dynamo, as `test_compile.py` does every op.
    [
        *(slow(op, True, False) for op in OPS if op != "verify_gumbel"),
        slow("verify_exact", False, True),
        ("verify_gumbel", True, False),
    ],
)
def test_export_keeps_one_op(op: str, filtered: bool, strict: bool, tmp_path: Path) -> None:
    given = tensor_arguments(op, filtered=filtered)
    shapes = ({name: {0: torch.export.Dim("batch", min=1, max=4096)} for name in given},)
    program = torch.export.export(module(op), (given,), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    for each in (program, program.run_decompositions(), torch.export.load(tmp_path / "program.pt2")):
        assert op_nodes(each) == [f"specops.{op}.default"]
    for batch in (1, 9):
        fresh = tensor_arguments(op, batch, filtered=filtered, seed=batch)
        assert_equal(each.module()(fresh), module(op)(fresh))


@pytest.mark.parametrize("op", [op if op == "verify_block" else slow(op) for op in VERIFY_OPS])
def test_a_dynamic_number_of_drafts_begins_at_one(op: str) -> None:
    given, drafts = tensor_arguments(op, filtered=False), torch.export.Dim("drafts", min=1, max=30)
    sizes = {"target_logits": drafts + 1, "draft_tokens": drafts, "draft_logits": drafts, "draft_lse": drafts}
    sizes["accept_uniforms"] = drafts
    shapes = {name: {1: sizes[name]} if name in sizes else None for name in given}
    program = torch.export.export(module(op), (given,), dynamic_shapes=(shapes,)).module()
    for num_drafts in (1, 2):
        fresh = tensor_arguments(op, 4, num_drafts, filtered=False)
        assert_equal(program(fresh), module(op)(fresh))


def test_one_hot_drafts_and_what_eager_refuses() -> None:
    call, given = module("verify_exact", draft_logits=None), tensor_arguments("verify_exact")
    del given["draft_logits"], given["draft_lse"], given["draft_is_one_hot"]
    program = torch.export.export(call, (given,))
    assert op_nodes(program) == ["specops.verify_exact.default"]
    assert_equal(program.module()(given), call(given))
    with pytest.raises((ValueError, RuntimeError), match=r"sample_uniforms: expected \[B\] = \[4\], got shape \[3\]"):
        torch.export.export(call, (given | {"sample_uniforms": given["sample_uniforms"][:3]},))


class DrawsItsNumbers(nn.Module):
    def forward(self, given: dict[str, Tensor], seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        accept = torch_specops.uniforms(seeds, positions, given["draft_tokens"].shape[1], "accept")
        sample = torch_specops.uniforms(seeds, positions, 1, "sample")[:, 0]
        return torch_specops.verify_exact(**given | {"accept_uniforms": accept, "sample_uniforms": sample})


def test_a_verification_that_draws_its_numbers_has_four_nodes() -> None:
    given, seeds = tensor_arguments("verify_exact", filtered=False), torch.arange(4)
    program = torch.export.export(DrawsItsNumbers(), (given, seeds, seeds + 1))
    for each in (program, program.run_decompositions()):
        numbers = ["specops.uniforms.default", "specops.uniforms.default", "aten.select.int"]
        assert op_nodes(each) == [*numbers, "specops.verify_exact.default"]
    assert_equal(program.module()(given, seeds, seeds + 5), DrawsItsNumbers()(given, seeds, seeds + 5))


# The caches of both models; the text and its state. All else is weights and arguments that are only read.
BUFFERS = {f"{kind}_{index}" for kind in ("keys", "values") for index in range(2)}
STATE = {"tokens", "lengths", "finished", "failed"}


# Raised inside torch 2.11 while it reads a saved program.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning:torch.export")
def test_a_whole_step_with_its_caches(tmp_path: Path) -> None:
    """Both models, the drafts, the verification and the writing of caches and text: one program, the loop's tokens."""
    with torch.no_grad():
        program = torch.export.export(tiny_step(), tuple(step_state()))
        ops = [name for name in op_nodes(program) if name.startswith("specops.")]
        drafts = ["specops.uniforms.default", *["specops.sample.default"] * NUM_DRAFTS]
        assert ops == [*drafts, "specops.step_uniforms.default", "specops.verify_exact.default"]
        changed = program.run_decompositions().graph_signature
    assert set(changed.buffers_to_mutate.values()) == BUFFERS
    assert set(changed.user_inputs_to_mutate.values()) == STATE

    expected = decode(tiny_step(), step_state())
    assert decode(program.module(), step_state()) == expected
    torch.export.save(program, tmp_path / "step.pt2")
    assert decode(torch.export.load(tmp_path / "step.pt2").module(), step_state()) == expected

    target, draft = tiny_pair()
    sampling = torch_specops.SamplingParams(temperature=[0.0, 0.8])
    decoder = torch_specops.SpeculativeDecoder(target, draft, num_draft_tokens=NUM_DRAFTS, sampling=sampling)
    ids, mask = padded(PROMPTS, "right")
    output = decoder.generate(ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, seed=torch.arange(2))
    texts = [row[:length].tolist() for row, length in zip(output.sequences, output.lengths, strict=True)]
    assert texts == expected
