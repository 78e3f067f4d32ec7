"""Requests over HTTP beside the same requests to a session without HTTP: time to first token, and tokens per second.

    python benchmarks/bench_serving.py --threads 2

Greedy, limits between 8 and `--longest` (most of them short). A client sends its next request when its last one has
ended, and all streams are read. "http" is `examples/server.py` in a process of its own; "session" is the same decoder
in this process, with the clients as tasks that iterate over handles. They take turns. With more clients than rows, the
time to the first token has the wait for a row.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import torch
from bench_drafts import HELDOUT
from markdown_table import table
from timing import Report, environment, options_of, settings_of, spread
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.cli.loading import AUSTEN, AUSTEN_DRAFT, SHIPPED
from torch_specops.drafts import PromptLookup

SERVER = Path(__file__).parents[1] / "examples" / "server.py"
MAX_LENGTH = 1024

# A prompt, and the most new tokens.
Asked = tuple[str, int]
# Seconds to the first token, and the number of tokens.
Answered = tuple[float, int]
Ask = Callable[[Asked], Awaitable[Answered]]


def requests_of(count: int, longest: int) -> list[Asked]:
    """Prompts of different lengths, each with a limit of its own. The logarithms of the limits are uniform."""
    draw, book = random.Random(0), HELDOUT.read_text(encoding="utf-8")
    starts = [draw.randrange(len(book) - 200) for _ in range(count)]
    texts = [book[start : start + draw.randrange(16, 128)] for start in starts]
    return [(text, round(8 * (longest / 8) ** draw.random())) for text in texts]


async def measure(ask: Ask, requests: list[Asked], clients: int) -> tuple[float, list[Answered]]:
    """Seconds of all requests together, and what each got."""
    remaining, found = iter(enumerate(requests)), dict[int, Answered]()

    async def client() -> None:
        for number, asked in remaining:
            found[number] = await ask(asked)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - started, [found[number] for number in range(len(requests))]


def of_session(decoder: SpeculativeDecoder, tokenizer: Any, rows: int, requests: list[Asked], clients: int) -> Any:
    async def ask(asked: Asked) -> Answered:
        started, times = time.perf_counter(), list[float]()
        ids = tokenizer(asked[0])["input_ids"]
        async for _ in session.submit(Request(ids, asked[1], SamplingParams(temperature=0.0))):
            times.append(time.perf_counter() - started)
        return times[0], len(times)

    with decoder.session(rows, max_length=MAX_LENGTH) as session:
        threading.Thread(target=session.run).start()
        return asyncio.run(measure(ask, requests, clients))


def of_server(url: str, requests: list[Asked], clients: int) -> Any:
    async def run() -> Any:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:

            async def ask(asked: Asked) -> Answered:
                body = {"prompt": asked[0], "max_tokens": asked[1], "temperature": 0.0, "stream": True}
                started, first, usage = time.perf_counter(), 0.0, dict[str, int]()
                async with session.post(url, json=body | {"stream_options": {"include_usage": True}}) as response:
                    response.raise_for_status()
                    async for line in response.content:
                        first = first or time.perf_counter() - started
                        if line.startswith(b"data: {"):
                            usage = json.loads(line[6:]).get("usage", {})
                return first, usage["completion_tokens"]

            return await measure(ask, requests, clients)

    return asyncio.run(run())


@contextmanager
def serving(target: str, draft: str, rows: int, threads: int) -> Iterator[str]:
    """The address of a server that works until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--target", target, "--draft", draft, "--rows", str(rows), "--max-length", str(MAX_LENGTH)]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(SERVER), "--port", str(port), *options]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.terminate()
        process.wait()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--target", default=AUSTEN, help="a folder or a hub id")
    parser.add_argument("--draft", default=AUSTEN_DRAFT, help="a folder, a hub id, or prompt-lookup")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--longest", type=int, default=192, help="the largest limit")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    target, draft = (str(SHIPPED.get(name, name)) for name in (options.target, options.draft))
    load, tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained(target)
    source = PromptLookup() if draft == "prompt-lookup" else load(draft)
    decoder = SpeculativeDecoder(load(target), source, num_draft_tokens=4)
    requests = requests_of(options.requests, options.longest)
    report = Report(options.out, environment(torch.device("cpu")), arguments=settings_of(options))
    with serving(target, draft, options.rows, options.threads) as url:
        ways: dict[str, Callable[[int], Any]] = {
            "http": lambda clients: of_server(url, requests, clients),
            "session": lambda clients: of_session(decoder, tokenizer, options.rows, requests, clients),
        }
        for run in ways.values():
            run(options.rows)
        for clients in options.clients:
            found: dict[str, list[Any]] = {name: [] for name in ways}
            for name in list(ways) * options.rounds:
                found[name].append(ways[name](clients))
            for name, runs in found.items():
                seconds = [each for each, _ in runs]
                counts = [[count for _, count in answers] for _, answers in runs]
                firsts = [first for _, answers in runs for first, _ in answers]
                record = {"clients": clients, "way": name, "seconds": seconds, "new_tokens": sum(counts[0])}
                record |= {"tokens_per_second": sum(counts[0]) / statistics.median(seconds)}
                record |= spread(firsts, "ms", "first_token")
                # The two are compared on the same work.
                record |= {"same_lengths": counts == [[count for _, count in found["session"][0][1]]] * len(runs)}
                report.add([record])
    print(f"{options.requests} requests, {options.rows} rows; time to first token: median and quartiles in ms")
    line = "{clients} | {way} | {tokens_per_second:.1f} | {first_token_median_ms:.1f} | {quartiles} | {same_lengths}"
    shown = [
        each | {"quartiles": " to ".join(f"{edge:.1f}" for edge in each["first_token_quartiles_ms"])}
        for each in report.records
    ]
    print(table("clients | way | tokens/s | first token | quartiles | same lengths", line, shown, padded=True))
    return report.records


if __name__ == "__main__":
    main()
