"""Targets that transformers' `tp_plan` shards over two processes."""

from __future__ import annotations

import io
import multiprocessing
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_docs import PYTHON
from tiny_models import PROMPTS, perturbed, tiny
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from torch_specops import Request, SamplingParams, SpeculativeDecoder, generate
from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate
from torch_specops.schedules import Auto, Constant

SAMPLING = {"greedy": SamplingParams(temperature=0.0), "gumbel": SamplingParams(temperature=0.7, top_p=0.95)}
NUM_TOKENS = 10
BEHIND: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "custom_generate": custom_generate}
Texts = list[list[int]]


def texts_of(target: PreTrainedModel, sampling: SamplingParams, **options: Any) -> Texts:
    output = generate(target, PROMPTS, sampling=sampling, seed=3, max_new_tokens=NUM_TOKENS, **options)
    return [output.new_tokens(row) for row in range(len(PROMPTS))]


def session_texts(target: PreTrainedModel, draft: PreTrainedModel) -> Texts:
    decoder = SpeculativeDecoder(target, draft, sampling=SAMPLING["greedy"])
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    done = sorted(decoder.generate_many(requests, batch_size=2), key=lambda completion: completion.index)
    return [completion.new_tokens.tolist() for completion in done]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(target: PreTrainedModel, draft: PreTrainedModel, rank: int) -> list[str]:
    """What is said of calls that differ on the ranks, and of settings that a sharded target does not take."""

    def run(**options: Any) -> Callable[[], object]:
        return partial(generate, **({"target": target, "input_ids": PROMPTS, "seed": 3, "max_new_tokens": 2} | options))

    def step(submit: Callable[[Any], object]) -> Callable[[], object]:
        def steps() -> None:
            session = decoder.session(2, max_length=64)
            submit(session)
            session.step()
            session.step()

        return steps

    def submit_unequal(session: Any) -> None:
        session.submit(Request([5, 6], 8, seed=1))
        session.submit(Request([5, 6 + rank], 8, seed=rank))

    def cancel_one(session: Any) -> None:
        handles = [session.submit(Request([5, 6], 8, seed=seed)) for seed in (1, 2)]
        session.step()
        handles[rank].cancel()

    decoder = SpeculativeDecoder(target, draft)
    calls = [
        run(seed=rank),
        run(input_ids=[[5, 6, 0][: 2 + rank]], sampling={"temperature": 0.0}),
        run(max_new_tokens=2 + rank, sampling={"temperature": 0.0}, seed=rank),
        run(sampling={"top_k": rank}),
        run(draft=[PromptLookup(), draft][rank], verify="exact", num_draft_tokens=2),
        run(draft=draft, num_draft_tokens=2 + rank),
        step(submit_unequal),
        step(cancel_one),
        run(draft=draft, schedule="auto"),
        run(draft=draft, schedule=Auto(2)),
        run(compile=True),
        partial(target.generate, torch.tensor([PROMPTS[0]]), max_time=9.0, **BEHIND),
        # In float64 this is refused for another reason.
        lambda: generate(target.float(), PROMPTS, invariant=True),
    ]
    timed = decoder.session(2, max_length=64).submit(Request([5], max_time=9.0))
    return [*map(refusal, calls), str(timed.prompt)]


DIFFER = "RuntimeError: target: its ranks must make the same calls, but differ in "
CLOCKS = "max_time: expected None, because the clocks of a sharded target's ranks differ"
REFUSALS = [
    f"{DIFFER}seed",
    f"{DIFFER}input_ids",
    f"{DIFFER}max_new_tokens",
    f"{DIFFER}top_k",
    f"{DIFFER}draft",
    f"{DIFFER}num_draft_tokens or schedule",
    f"{DIFFER}request 1: input_ids, request 1: seed",
    f"{DIFFER}requests",
    *["ValueError: schedule: 'auto' measures times, which differ on the ranks of a sharded target"] * 2,
    "ValueError: compile: expected False or 'auto', got True: compiled steps of a model that is sharded over ranks "
    "are not tested",
    f"ValueError: {CLOCKS}",
    "ValueError: invariant: model.embed_tokens (Embedding) has a forward of another package, or one that was set on "
    "it, which was not compared",
    CLOCKS,
]


def answer(rank: int, folder: str, connection: Connection) -> None:
    # As pyproject.toml says of the tests' own process.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script(_method)?` is (deprecated|not supported)")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    of_group: dict[str, Any] = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **of_group)
    target = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    draft = perturbed(LlamaForCausalLM.from_pretrained(folder))
    lookup = PromptLookup(min_ngram=1)
    texts = {
        (name, kind): texts_of(target, sampling, draft=each, verify="gumbel")
        for name, sampling in SAMPLING.items()
        for kind, each in {"nothing": None, "lookup": lookup, "model": draft}.items()
    }
    texts["greedy", "session"] = session_texts(target, draft)
    ids = torch.tensor([PROMPTS[0]])
    behind = target.generate(ids, **BEHIND)
    schedule = SpeculativeDecoder(target, lookup).schedule
    printed = io.StringIO()
    said = refusals(target, draft, rank)
    (block,) = (block for block in PYTHON if block.title == "needs torchrun")
    with redirect_stdout(printed):
        exec(block.text, {})
    connection.send((texts, behind[0, ids.shape[1] :].tolist(), type(schedule), said, printed.getvalue()))


@pytest.mark.slow
def test_ranks_write_the_same_texts_or_say_what_differs(tmp_path: Path) -> None:
    """The texts are those of the whole model. The block of the page runs too."""
    whole = tiny("llama")
    whole.save_pretrained(tmp_path)
    context = multiprocessing.get_context("forkserver")
    # One process imports what both need.
    context.set_forkserver_preload(["torch_specops.hf.adapter", "transformers.models.llama.modeling_llama", "torchao"])
    connections = []
    for rank in range(2):
        own, other = context.Pipe()
        context.Process(target=answer, args=(rank, str(tmp_path), other), daemon=True).start()
        other.close()
        connections.append(own)
    expected = {name: texts_of(whole, sampling) for name, sampling in SAMPLING.items()}
    (block,) = (block for block in PYTHON if block.title == "needs torchrun")
    for rank, connection in enumerate(connections):
        assert connection.poll(120), f"rank {rank} does not answer"
        texts, behind, schedule, said, printed = connection.recv()
        assert [key for key, each in texts.items() if each != expected[key[0]]] == []
        assert behind == expected["greedy"][0] and schedule is Constant
        assert said == REFUSALS
        assert printed.split() == (block.printed.split() if rank == 0 and block.printed else [])
