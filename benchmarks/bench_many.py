"""Many requests of mixed lengths: `generate_many` beside static batches, and beside transformers.

    python benchmarks/bench_many.py --threads 2
    python benchmarks/bench_many.py --target smollm2-135m-instruct --draft prompt-lookup --num-draft-tokens 10

Greedy, limits between 8 and `--longest` (most of them short), no eos. Compared are

- "generate_many": a row takes the next request when it has ended;
- "static batches": the same decoder, the same requests in their order, as many at a time as there are rows;
- "no draft": `generate_many` with the target alone;
- "generate_batch": transformers' continuous batching, which has no drafts, with as many requests at a time, and with a
  cache and batches of the size that these requests need (with its defaults it is far slower on a CPU);
- "assisted": transformers' assisted generation with the same draft and K, one request at a time.

They take turns. Times are of all requests together, reading the prompts included.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_drafts import HELDOUT, MORE_PROMPTS
from markdown_table import table
from rich.console import Console
from rich.progress import Progress
from timing import Report, environment, options_of, settings_of
from torch.nn.utils.rnn import pad_sequence
from transformers import ContinuousBatchingConfig, GenerationConfig

from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.cli.bench import PROMPTS
from torch_specops.cli.loading import AUSTEN, AUSTEN_DRAFT, log_messages_off
from torch_specops.cli.models import encode, load_models

GREEDY = SamplingParams(temperature=0.0)

Texts = list[list[int]]


def requests_of(tokenizer: Any, target: str, count: int, longest: int) -> list[Request]:
    """Prompts of different lengths, each with a limit of its own. The logarithms of the limits are uniform."""
    draw = random.Random(0)
    texts = PROMPTS + MORE_PROMPTS
    if target == AUSTEN:
        book = HELDOUT.read_text(encoding="utf-8")
        starts = [draw.randrange(len(book) - 200) for _ in range(count)]
        texts = [book[start : start + draw.randrange(16, 128)] for start in starts]
    limits = [round(8 * (longest / 8) ** draw.random()) for _ in range(count)]
    prompts = [encode(tokenizer, texts[number % len(texts)])[0] for number in range(count)]
    return [Request(prompt, limit, GREEDY, eos_token_id=()) for prompt, limit in zip(prompts, limits, strict=True)]


def many(decoder: SpeculativeDecoder, requests: list[Request], rows: int) -> Texts:
    found = {each.index: each.new_tokens.tolist() for each in decoder.generate_many(requests, batch_size=rows)}
    return [found[index] for index in range(len(requests))]


def static(decoder: SpeculativeDecoder, requests: list[Request], rows: int) -> Texts:
    texts: Texts = []
    for first in range(0, len(requests), rows):
        batch = requests[first : first + rows]
        ids = pad_sequence([request.input_ids for request in batch], batch_first=True)
        mask = pad_sequence([torch.ones_like(request.input_ids) for request in batch], batch_first=True)
        limits = [request.max_new_tokens for request in batch]
        settings = {"attention_mask": mask, "max_new_tokens": limits, "sampling": GREEDY, "eos_token_id": ()}
        output = decoder.generate(ids, **settings)
        texts += [output.new_tokens(row) for row in range(len(batch))]
    return texts


def assisted(model: Any, helper: dict[str, Any], requests: list[Request]) -> Texts:
    texts: Texts = []
    with log_messages_off():
        for request in requests:
            prompt = request.input_ids.unsqueeze(0)
            output = model.generate(prompt, do_sample=False, max_new_tokens=request.max_new_tokens, **helper)
            texts.append(output[0, prompt.shape[1] :].tolist())
    return texts


def continuous(model: Any, requests: list[Request], rows: int) -> Texts:
    """What `generate_batch` does, with a limit for each request."""
    block, longest = 32, max(len(request.input_ids) + request.max_new_tokens for request in requests)
    sizes = {"block_size": block, "num_blocks": (rows + 1) * -(-longest // block), "max_batch_tokens": 256}
    ways = {"max_requests_per_batch": rows, "use_cuda_graph": False, "use_async_batching": False}
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(**sizes, **ways)
    settings = {"generation_config": generation, "continuous_batching_config": config, "warmup": False}
    texts: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(**settings, block=True, timeout=5) as manager:
        for number, request in enumerate(requests):
            manager.add_request(request.input_ids.tolist(), str(number), max_new_tokens=request.max_new_tokens)
        while len(texts) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("generate_batch: its thread has ended")
            if result is not None and result.is_finished():
                texts[result.request_id] = list(result.generated_tokens)
    return [texts[str(number)] for number in range(len(requests))]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--target", default=AUSTEN)
    parser.add_argument("--draft", default=AUSTEN_DRAFT)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--schedule", default="constant")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--longest", type=int, default=192, help="the largest limit")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    models, tokenizer = load_models(Console(stderr=True), options.target, options.draft, torch.device("cpu"))
    requests = requests_of(tokenizer, options.target, options.requests, options.longest)
    model = models.target.model

    def decoder(draft: Any) -> SpeculativeDecoder:
        settings = {"num_draft_tokens": options.num_draft_tokens, "schedule": options.schedule, "compile": False}
        return SpeculativeDecoder(model, draft, **settings)

    drafting, plain = decoder(models.draft), decoder(None)
    # Of its own, because continuous batching changes the attention of its model.
    batched = copy.deepcopy(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    helper = models.assistance(options.num_draft_tokens)
    if "assistant_model" in helper:
        count = {"num_assistant_tokens": options.num_draft_tokens, "num_assistant_tokens_schedule": "constant"}
        constant = GenerationConfig(pad_token_id=0, assistant_confidence_threshold=0.0, **count)
        helper["assistant_model"].generation_config = constant
    ways: dict[str, Callable[[], Texts]] = {
        "generate_many": partial(many, drafting, requests, options.rows),
        "static batches": partial(static, drafting, requests, options.rows),
        "no draft": partial(many, plain, requests, options.rows),
        "generate_batch": partial(continuous, batched, requests, options.rows),
        "assisted": partial(assisted, model, helper, requests),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, Texts] = {}
    with Progress(transient=True) as progress:
        for name in progress.track(list(ways) * options.rounds, description="decoding"):
            started = time.perf_counter()
            texts[name] = ways[name]()
            seconds[name].append(time.perf_counter() - started)
    num_tokens = sum(request.max_new_tokens for request in requests)
    report = Report(
        options.out, environment(torch.device("cpu")), arguments=settings_of(options), new_tokens=num_tokens
    )
    first = next(iter(ways))
    for name, own in seconds.items():
        median, stats = statistics.median(own), {"generate_many": drafting.stats, "no draft": plain.stats}.get(name)
        record = {"name": name, "seconds": own, "tokens_per_second": num_tokens / median}
        record |= {"speedup_of_first": median / statistics.median(seconds[first])}
        # Each round against the same round of the first one.
        record |= {"speedup_of_first_by_round": [a / b for a, b in zip(own, seconds[first], strict=True)]}
        record |= {"same_texts": sum(a == b for a, b in zip(texts[name], texts[first], strict=True))}
        record |= {"tokens_per_row_and_step": None if stats is None else stats.mean_acceptance_length}
        report.add([record])
    print(f"{len(requests)} requests, {num_tokens} new tokens, {options.rows} rows; {first} is so many times as fast")
    line = "{name} | {tokens_per_second:.1f} | {speedup_of_first:.2f} | {same_texts} | {tokens_per_row_and_step:.2f}"
    header = f"way | tokens/s | {first} is faster by | same texts | tokens per row and step"
    print(table(header, line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
