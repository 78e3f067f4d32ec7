"""Times vLLM's rejection sampling with and without the plugin, in the environment of `make test-vllm`: python bench.py

Logits of the size of a small model's vocabulary, drafts of which most are accepted; one thread, the median of calls.
"""

from __future__ import annotations

import argparse
import time

import specops_vllm
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 8), ("drafts", 4), ("vocab", 49_152), ("calls", 25)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # As the worker for CPUs does: C++ in the place of Triton.
    current_platform.register_triton_kernel_overrides()
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {args}")
    b, k, v = args.batch, args.drafts, args.vocab
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(b, k + 1, v, generator=generator)
    q = torch.softmax(logits[:, :k] + 0.5 * torch.randn(b, k, v, generator=generator), -1).flatten(0, 1)
    tokens = torch.multinomial(q, 1, generator=generator).view(b, k)
    metadata = SpecDecodeMetadata.make_dummy(tokens.tolist(), torch.device("cpu"))
    rows = torch.arange(b * (k + 1), dtype=torch.int32).view(b, k + 1)
    metadata.target_logits_indices = rows[:, :k].flatten()
    metadata.bonus_logits_indices = rows[:, k].contiguous()
    sampler = RejectionSampler(Sampler())
    for name, top_p, probs in (
        ("draft model", None, q),
        ("draft model, top-p 0.9", torch.full((b,), 0.9), q),
        ("n-gram", None, None),
        ("n-gram, top-p 0.9", torch.full((b,), 0.9), None),
    ):
        sampling = settings(b, top_p)
        for who, forward in (("vLLM", RejectionSampler.forward), ("plugin", None)):
            forward = forward or specops_vllm.taking_over(RejectionSampler.forward)
            times = []
            for _ in range(args.calls):
                # vLLM may overwrite the logits.
                given = logits.flatten(0, 1).clone()
                start = time.perf_counter()
                forward(sampler, metadata, probs, given, sampling)
                times.append(time.perf_counter() - start)
            times.sort()
            print(f"{name:24} {who:8} median {1e3 * times[len(times) // 2]:6.1f} ms, least {1e3 * times[0]:6.1f} ms")


def settings(batch: int, top_p: torch.Tensor | None) -> SamplingMetadata:
    zeros = torch.zeros(batch)
    return SamplingMetadata(
        temperature=torch.ones(batch),
        all_greedy=False,
        all_random=True,
        top_p=top_p,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


if __name__ == "__main__":
    main()
