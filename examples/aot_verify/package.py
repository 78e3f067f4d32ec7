"""Makes AOTInductor packages that run without Python: one of `verify_exact`, one of a whole decoding step.

    python examples/aot_verify/package.py out
    python examples/aot_verify/build.py out/aot_verify
    out/aot_verify verify out/verify.pt2 out/verify_inputs.pt
    out/aot_verify decode out/step.pt2 out/step_inputs.pt

The step is that of the byte-level pair that comes with the package: a token is a byte. docs/own_loop.md says what a
package can do and what it cannot.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_specops
from torch_specops import Verifier
from torch_specops.decode.state import DecodeState
from torch_specops.decode.step import speculative_step
from torch_specops.drafts import ModelDraft
from torch_specops.hf import language_model
from torch_specops.sampling import SamplingTensors


class Verify(nn.Module):
    """`verify_exact` with a temperature per row and the draft's logsumexp."""

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
            target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature, draft_lse
        )


class DecoderStep(nn.Module):
    """One step: K forwards of the draft, one of the target, the verification, and what it emits written to the text.

    The caches are buffers of the module. The text and what goes with it are inputs, changed in place, so that the
    program around the step holds them: it writes a prompt, steps until `finished`, and reads the text.

    A row that is marked as finished emits nothing, but its newest token is read. This is how a prompt is read without
    a second program: step once for each of its tokens, with `lengths` from 1 to its own.

    Args:
        target, draft: decoder-only transformers models.
        batch: rows.
        capacity: the most tokens of a row, and num_draft_tokens + 1.
        num_draft_tokens: K.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, batch: int, capacity: int, num_draft_tokens: int
    ) -> None:
        super().__init__()
        self.target, self.draft = target, draft
        self.num_draft_tokens = num_draft_tokens
        self._read_target, draft_model = language_model(target), language_model(draft)
        self._propose = ModelDraft(draft_model)
        self._verify = Verifier()
        self._layers = []
        first = torch.zeros(batch, 1, dtype=torch.int64, device=target.device)
        for model in (self._read_target, draft_model):
            model.start(batch, capacity)
            with torch.no_grad():
                model.forward(first, first)
            self._layers += model.key_values
        for index, layer in enumerate(self._layers):
            self.register_buffer(f"keys_{index}", layer.keys)
            self.register_buffer(f"values_{index}", layer.values)

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor,
        limits: Tensor,
        eos: Tensor,
        finished: Tensor,
        failed: Tensor,
        seeds: Tensor,
        temperature: Tensor,
    ) -> Tensor:
        """The arguments are the fields of `DecodeState`; the result is the record [B, 2 K+4] (`unpack_record`)."""
        # While the module is exported, its buffers are others than those that the caches know.
        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = getattr(self, f"keys_{index}"), getattr(self, f"values_{index}")
        state = DecodeState(
            tokens, lengths, limits, eos, finished, failed, seeds, SamplingTensors(temperature), is_sampled=True
        )
        return speculative_step(self._read_target, self._propose, state, self.num_draft_tokens, self._verify)


def verify_inputs(batch: int, num_draft_tokens: int = 3, vocab_size: int = 67, seed: int = 0) -> list[Tensor]:
    """Drafts sampled from random logits near the target's, as `Verify` takes them."""
    g = torch.Generator().manual_seed(seed)
    target_logits = 3 * torch.randn(batch, num_draft_tokens + 1, vocab_size, generator=g)
    draft_logits = target_logits[:, :-1] + torch.randn(batch, num_draft_tokens, vocab_size, generator=g)
    temperature = torch.tensor([0.7, 0.0, 1.3]).repeat(batch)[:batch]
    propose = torch.rand(batch * num_draft_tokens, generator=g)
    drafts, lse = torch_specops.sample(
        draft_logits.flatten(0, 1), propose, temperature.repeat_interleave(num_draft_tokens)
    )
    shape = (batch, num_draft_tokens)
    uniforms = torch.rand(batch, num_draft_tokens + 1, generator=g)
    accept, sample = uniforms[:, :-1].contiguous(), uniforms[:, -1].contiguous()
    return [target_logits, drafts.view(shape), draft_logits, accept, sample, temperature, lse.view(shape)]


def step_inputs(prompts: list[list[int]], max_new_tokens: int, capacity: int, temperature: float) -> list[Tensor]:
    """The state before the first step, as `DecoderStep` takes it."""
    batch = len(prompts)
    tokens = torch.zeros(batch, capacity, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    no_eos, no = torch.full((batch, 1), -1), torch.zeros(batch, dtype=torch.bool)
    seeds = torch.arange(batch)
    return [tokens, lengths, lengths + max_new_tokens, no_eos, no, no.clone(), seeds, torch.full((batch,), temperature)]


def package(module: nn.Module, inputs: list[Tensor], path: Path, dynamic_batch: bool, **options: Any) -> None:
    """Export, compile and write `path`; beside it the inputs, as the C++ program reads them."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    shapes = tuple({0: batch} for _ in inputs) if dynamic_batch else None
    with torch.no_grad():
        program = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    torch.save(inputs, path.with_name(f"{path.stem}_inputs.pt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", default="It was not to be ")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--num-draft-tokens", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    package(Verify(), verify_inputs(batch=4), args.out / "verify.pt2", dynamic_batch=True)

    folder = files("torch_specops") / "data" / "austen_bytes"
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / role).eval() for role in ("target", "draft"))
    prompts = [list(args.prompt.encode())]
    capacity = len(prompts[0]) + args.max_new_tokens + args.num_draft_tokens + 1
    inputs = step_inputs(prompts, args.max_new_tokens, capacity, args.temperature)
    step = DecoderStep(target, draft, len(prompts), capacity, args.num_draft_tokens)
    package(step, inputs, args.out / "step.pt2", dynamic_batch=False)


if __name__ == "__main__":
    main()
