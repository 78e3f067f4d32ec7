"""What a step of the eager, sampled loop costs besides the models' forwards, beside transformers' loops.

    python benchmarks/bench_overhead.py
    python benchmarks/bench_overhead.py --target smollm2-135m-instruct --draft prompt-lookup --num-draft-tokens 10

A step lasts from the end of one forward of the target to the end of the next one. Its time is the processor's, of all
threads of this process, so that other processes matter little. It has three parts:

    forwards     in the forwards of the target and of the draft
    ops          in `verify_exact`, `sample` and the uniform numbers
    elsewhere    all the rest: masks, positions, looking up drafts, committing tokens, records

The loops take turns. A number is the median over the steps of all rounds, but for the first step of a run.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from markdown_table import table
from rich.console import Console
from timing import Report, environment, options_of, settings_of
from torch import nn

from torch_specops import SamplingParams
from torch_specops.cli.loading import AUSTEN, AUSTEN_DRAFT
from torch_specops.cli.models import encode, load_models
from torch_specops.cli.providers import make_providers

# Where the loop looks up what counts as an op.
OPS = {
    "torch_specops.decode.step": ["verify_exact", "sample", "verification_uniforms"],
    "torch_specops.drafts.model": ["sample", "uniforms"],
}
PROMPT = "It was not in her nature to be unkind, and yet she could not help wondering"


class StepClock:
    """Adds up the processor time in forwards and in ops, step by step.

    Attributes:
        steps: of each finished step the seconds in forwards, in ops and elsewhere.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []
        self._forwards = self._ops = self._entered = self._step_began = 0.0

    @contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Within it the target, the first of the modules, the draft and the ops are timed."""
        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave_forward).remove)
            stack.callback(modules[0].register_forward_hook(self._end_step).remove)
            for name, functions in OPS.items():
                for function in functions:
                    timed = self._timed(getattr(importlib.import_module(name), function))
                    stack.enter_context(patch(f"{name}.{function}", timed))
            self._step_began = 0.0
            yield

    def _enter(self, *arguments: object) -> None:
        self._entered = time.process_time()

    def _leave_forward(self, *arguments: object) -> None:
        self._forwards += time.process_time() - self._entered

    def _timed(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            result = op(*arguments, **options)
            self._ops += time.process_time() - began
            return result

        return call

    def _end_step(self, *arguments: object) -> None:
        now = time.process_time()
        if self._step_began:
            elsewhere = now - self._step_began - self._forwards - self._ops
            self.steps.append((self._forwards, self._ops, elsewhere))
        self._step_began, self._forwards, self._ops = now, 0.0, 0.0


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=5)
    parser.add_argument("--target", default=AUSTEN)
    parser.add_argument("--draft", default=AUSTEN_DRAFT)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    models, tokenizer = load_models(Console(stderr=True), options.target, options.draft, device)
    sampling = SamplingParams(temperature=options.temperature)
    prompt = encode(tokenizer, PROMPT)
    report = Report(options.out, environment(device), arguments=settings_of(options))
    for batch in options.batch:
        providers = make_providers(models, options.new_tokens, options.num_draft_tokens, compile=False)
        providers = [each for each in providers if "own K" not in each.name]
        clocks = {each.name: (each, StepClock()) for each in providers if batch == 1 or not each.single}
        input_ids = prompt.repeat(batch, 1)
        for number in range(options.rounds + 1):
            for provider, clock in clocks.values():
                with clock.watching(provider.modules):
                    provider.decode(input_ids, torch.ones_like(input_ids), sampling, number)
                if number == 0:
                    clock.steps.clear()
        for name, (_, clock) in clocks.items():
            forwards, ops, elsewhere = (1e6 * statistics.median(part) for part in zip(*clock.steps, strict=True))
            parts = {"forwards_us": forwards, "ops_us": ops, "elsewhere_us": elsewhere, "outside_us": ops + elsewhere}
            report.add([{"loop": name, "batch": batch, "steps": len(clock.steps)} | parts])
    header = "loop | B | steps | forwards us | ops us | elsewhere us | outside the forwards us"
    line = "{loop} | {batch} | {steps} | {forwards_us:.0f} | {ops_us:.0f} | {elsewhere_us:.0f} | {outside_us:.0f}"
    print(table(header, line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
