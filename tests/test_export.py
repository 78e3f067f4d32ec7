"""`torch.export` keeps one op per call, and takes a whole decoding step with its caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aot_example import MAX_NEW_TOKENS, NUM_DRAFTS, PROMPTS, decode, step_state, tiny_pair, tiny_step
from tiny_models import padded
from torch import Tensor, nn

import torch_specops

# torch's own: its exporter copies what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

K, VOCAB_SIZE = 3, 67


class VerifyExact(nn.Module):
    def forward(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_logits: Tensor,
        accept_uniforms: Tensor,
        sample_uniforms: Tensor,
        temperature: Tensor,
        draft_lse: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return torch_specops.verify_exact(
            target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature, draft_lse, 0.9
        )


class VerifyOneHot(nn.Module):
    def forward(
        self, target_logits: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch_specops.verify_exact(target_logits, draft_tokens, None, accept_uniforms, sample_uniforms)


class VerifyBlock(nn.Module):
    def forward(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_logits: Tensor,
        accept_uniforms: Tensor,
        sample_uniforms: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return torch_specops.verify_block(
            target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature
        )


class VerifySigmoid(nn.Module):
    def forward(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_logits: Tensor,
        accept_uniforms: Tensor,
        sample_uniforms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return torch_specops.verify_sigmoid(
            target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, -4.0, 3.0
        )


class Sample(nn.Module):
    def forward(self, logits: Tensor, uniforms: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return torch_specops.sample(logits, uniforms, temperature)


class SampleFiltered(nn.Module):
    def forward(
        self, logits: Tensor, uniforms: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch_specops.sample(logits, uniforms, temperature, top_k, top_p)


# module -> its op, the names of its inputs
MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    VerifyExact: (
        "verify_exact",
        (
            "target_logits",
            "draft_tokens",
            "draft_logits",
            "accept_uniforms",
            "sample_uniforms",
            "temperature",
            "draft_lse",
        ),
    ),
    VerifyOneHot: ("verify_exact", ("target_logits", "draft_tokens", "accept_uniforms", "sample_uniforms")),
    VerifyBlock: (
        "verify_block",
        ("target_logits", "draft_tokens", "draft_logits", "accept_uniforms", "sample_uniforms", "temperature"),
    ),
    VerifySigmoid: (
        "verify_sigmoid",
        ("target_logits", "draft_tokens", "draft_logits", "accept_uniforms", "sample_uniforms"),
    ),
    Sample: ("sample", ("logits", "uniforms", "temperature")),
    SampleFiltered: ("sample", ("logits", "uniforms", "temperature", "top_k", "top_p")),
}


def inputs(module: type[nn.Module], batch: int, seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    target_logits = 3 * torch.randn(batch, K + 1, VOCAB_SIZE, generator=g)
    draft_logits = target_logits[:, :-1] + torch.randn(batch, K, VOCAB_SIZE, generator=g)
    temperature = torch.tensor([0.7, 0.0, 1.3, 2.0]).repeat(batch // 4 + 1)[:batch]
    scaled = draft_logits / torch.where(temperature > 0, temperature, 1.0).view(-1, 1, 1)
    values = {
        "target_logits": target_logits,
        "draft_tokens": draft_logits.argmax(-1),
        "draft_logits": draft_logits,
        "accept_uniforms": torch.rand(batch, K, generator=g),
        "sample_uniforms": torch.rand(batch, generator=g),
        "temperature": temperature,
        "draft_lse": scaled.logsumexp(-1),
        "logits": target_logits[:, 0].contiguous(),
        "uniforms": torch.rand(batch, generator=g),
        "top_k": torch.arange(batch) % 4 * 5,
        "top_p": torch.tensor([0.9, 1.0, 0.5]).repeat(batch // 3 + 1)[:batch],
    }
    return tuple(values[name] for name in MODULES[module][1])


def assert_same(got: Any, expected: Any) -> None:
    assert len(got) == len(expected) == 2
    assert torch.equal(got[0], expected[0])
    # Only the logsumexp of `sample` is a float; a compiled sum may differ in its last bit.
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0)


def op_nodes(program: torch.export.ExportedProgram) -> list[str]:
    return [
        str(node.target) for node in program.graph.nodes if node.op == "call_function" and "getitem" not in node.name
    ]


@pytest.mark.parametrize(
    ("module", "strict", "dynamic"),
    # Strict export traces with Dynamo, as `test_compile.py` does every op; one is enough here.
    [*((module, False, True) for module in MODULES), (VerifyExact, False, False), (VerifyExact, True, True)],
)
def test_export_keeps_one_op(module: type[nn.Module], strict: bool, dynamic: bool) -> None:
    arguments = inputs(module, batch=4)
    batch = torch.export.Dim("batch", min=1, max=4096)
    shapes = tuple({0: batch} for _ in arguments) if dynamic else None
    program = torch.export.export(module(), arguments, dynamic_shapes=shapes, strict=strict)
    name = f"specops.{MODULES[module][0]}.default"
    assert op_nodes(program) == [name]
    assert op_nodes(program.run_decompositions()) == [name]
    for size in (1, 2, 4, 9) if dynamic else (4,):
        fresh = inputs(module, size, seed=size)
        assert_same(program.module()(*fresh), module()(*fresh))


def test_export_refuses_what_eager_refuses() -> None:
    arguments = list(inputs(Sample, batch=4))
    arguments[1] = arguments[1][:3]
    with pytest.raises((ValueError, RuntimeError), match=r"uniforms: expected \[N\] = \[4\], got shape \[3\]"):
        torch.export.export(Sample(), tuple(arguments), strict=False)


def test_saved_and_loaded(tmp_path: Path) -> None:
    arguments = inputs(VerifyExact, batch=4)
    torch.export.save(torch.export.export(VerifyExact(), arguments), tmp_path / "verify.pt2")
    loaded = torch.export.load(tmp_path / "verify.pt2")
    assert op_nodes(loaded) == ["specops.verify_exact.default"]
    assert_same(loaded.module()(*arguments), VerifyExact()(*arguments))


# The caches of both models; the text and its state. All else is weights and arguments that are only read.
BUFFERS = {f"{kind}_{index}" for kind in ("keys", "values") for index in range(2)}
STATE = {"tokens", "lengths", "finished", "failed"}


def test_a_whole_step_with_its_caches(tmp_path: Path) -> None:
    """Both models, the drafts, the verification and the writing of caches and text: one program, the loop's tokens."""
    with torch.no_grad():
        program = torch.export.export(tiny_step(), tuple(step_state()))
        ops = [name for name in op_nodes(program) if name.startswith("specops.")]
        assert ops == ["specops.sample.default"] * NUM_DRAFTS + ["specops.verify_exact.default"]
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
