"""vLLM's rejection sampling by the ops of torch_specops: a plugin, and a model of how an engine calls them.

vLLM loads it in each of its processes, by the entry point `vllm.general_plugins`. It replaces one method, and only if
the environment has TORCH_SPECOPS_VLLM=1. README.md has the commands and what was measured.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from torch_specops import verify_exact

SWITCH = "TORCH_SPECOPS_VLLM"
# The method's arguments and what lies behind them are no public interface of vLLM.
VLLM_VERSION = "0.32.0"

logger = logging.getLogger("vllm.specops")


def register() -> None:
    """The entry point: take over from vLLM if TORCH_SPECOPS_VLLM is 1.

    Raises:
        ValueError: the switch is neither "", "0" nor "1".
        RuntimeError: another version of vLLM, or its model runner V2, which does not call this method.
    """
    choice = os.environ.get(SWITCH, "")
    if choice not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}: expected 0 or 1, got {choice!r}")
    if choice != "1":
        return
    import vllm
    from vllm import envs
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    if vllm.__version__ != VLLM_VERSION:
        raise RuntimeError(f"{SWITCH}: made for vLLM {VLLM_VERSION}, this is {vllm.__version__}")
    if envs.VLLM_USE_V2_MODEL_RUNNER is not False:
        raise RuntimeError(f"{SWITCH}: expected VLLM_USE_V2_MODEL_RUNNER=0, as runner V2 has another sampler")
    # vLLM may load its plugins several times in a process.
    if not hasattr(RejectionSampler.forward, "__wrapped__"):
        RejectionSampler.forward = taking_over(RejectionSampler.forward)
        logger.info("torch_specops verifies the drafts")


def taking_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RejectionSampler.forward` by `verified`, or by the original where a request needs what is not taken over."""
    told: set[str] = set()

    @wraps(original)
    def forward(sampler: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        # A batch goes back as a whole: these are settings of requests, but the tensors are those of the batch.
        reasons = left_to_vllm(sampler, sampling)
        if reasons:
            if not told.issuperset(reasons):
                told.update(reasons)
                logger.warning("torch_specops leaves batches with %s to vLLM's own sampler", ", ".join(reasons))
            return original(sampler, metadata, draft_probs, logits, sampling)
        temperature = None if sampling.all_greedy else sampling.temperature
        rows = (metadata.num_draft_tokens, metadata.draft_token_ids, draft_probs, logits)
        tokens = verified(*rows, temperature, sampling.top_k, sampling.top_p, sampling.generators)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    return forward


def left_to_vllm(sampler: Any, sampling: Any) -> list[str]:
    """What of a batch is not taken over; [] = nothing."""
    holder = sampling.thinking_budget_state_holder
    # vLLM loads the processor of min_tokens always, and it has entries for the requests that use it.
    processors = [each for each in sampling.logitsprocs.all if getattr(each, "min_toks", True)]
    applies = {
        "logprobs": sampling.max_num_logprobs is not None or sampling.logprob_token_ids,
        "penalties": not sampling.no_penalties,
        "bad words": sampling.bad_words_token_ids,
        "allowed tokens": sampling.allowed_token_ids_mask is not None,
        "logits processors": processors,
        "a thinking budget": holder is not None and holder.has_tracked_requests(),
        "synthetic acceptance": sampler.synthetic_mode,
    }
    return [reason for reason in applies if applies[reason]]


def verified(
    counts: Sequence[int],
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    generators: Mapping[int, torch.Generator],
) -> Tensor:
    """Verify B requests with n_b drafts each, N = sum n_b of them, K = max n_b.

    vLLM draws drafts at the request's temperature, but without filters, so the filters are the target's alone.

    Args:
        counts: n_b.
        draft_tokens: [N], request after request.
        draft_probs: [N, V] float32, the probabilities that the drafts were drawn from; None = deterministic drafts
            (n-gram, or a model's argmax).
        logits: [N + B, V], of each request the n_b rows of its drafts, then that of the next token.
        temperature: [B], 0 = greedy; None = all greedy.
        top_k, top_p: [B]; None = no filter.
        generators: request -> its own generator. Other requests draw from torch's.

    Returns:
        [B, K + 1] int32: accepted drafts, the next token, then -1.
    """
    batch, width = len(counts), max(counts)
    device, vocab_size = logits.device, logits.shape[-1]
    if min(counts) == width:
        # The layout is ours already: nothing is copied.
        target = logits.view(batch, width + 1, vocab_size)
        tokens = draft_tokens.view(batch, width)
        q = None if draft_probs is None else draft_probs.view(batch, width, vocab_size)
    else:
        n = torch.tensor(counts, device=device).unsqueeze(1)
        before = n.cumsum(0) - n
        column = torch.arange(width + 1, device=device)
        # Past its drafts, a row repeats its last logits. They are not read: a draft of -1 ends the row.
        target = logits[before + torch.arange(batch, device=device).unsqueeze(1) + column.minimum(n)]
        at = (before + column[:-1]).clamp(max=len(draft_tokens) - 1)
        tokens = torch.where(column[:-1] < n, draft_tokens[at], -1)
        q = None if draft_probs is None else draft_probs[at]

    draft_logits = draft_lse = None
    if q is not None and temperature is not None:
        # The op divides by the temperature, which these probabilities have in them. They sum to one: no row is read for
        # its logsumexp.
        draft_logits = q.log().mul_(temperature.view(-1, 1, 1))
        draft_lse = torch.zeros(batch, width, device=device)

    # One number for the next token, then one for each draft. A request with a seed draws as many as it needs, so that
    # the other requests of its batch do not matter.
    uniforms = torch.rand(batch, width + 1, device=device)
    for row, generator in generators.items():
        uniforms[row, : counts[row] + 1].uniform_(generator=generator)

    temperature = 0.0 if temperature is None else temperature
    step = (target, tokens, draft_logits, uniforms[:, 1:], uniforms[:, 0], temperature)
    output, _ = verify_exact(*step, draft_lse=draft_lse, top_k=top_k, top_p=top_p, filter_draft=False)
    return output.int()
