"""examples/server.py: every client gets the text that `generate` gives its request alone. And the page on serving."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Completion, SamplingParams, SpeculativeDecoder
from torch_specops.decode import Handle

EXAMPLE = Path(__file__).parents[2] / "examples" / "server.py"
WAIT = 30.0
Body = dict[str, Any]

# Its text is "ééé...", whose two bytes take turns; it may end inside a character.
ACCENTS = {"logit_bias": {"195": 200.0, "169": 190.0}, "frequency_penalty": 20.0, "temperature": 0.0}
SETTINGS: list[Body] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "stop": [" the", "ing"]},
    {"temperature": 0.0, "logit_bias": {"101": -100.0}},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "seed": 2, "stop": "e "},
    {"seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"seed": 4, "temperature": 2.0},
    ACCENTS,
]
PROMPTS = ["It was not to be ", "She had ", "Mr. Darcy said that he would "]
REQUESTS = [
    settings | {"prompt": PROMPTS[place % 3], "max_tokens": 12 + place % 9}
    for place, settings in enumerate(SETTINGS * 4)
]
LONG = {"prompt": "In the morning ", "max_tokens": 900, "temperature": 0.0}
# The error names the field.
WRONG: list[tuple[str, Any]] = [
    ("prompt", {}),
    ("input_ids", {"prompt": ["It was"]}),
    ("input_ids", {"prompt": ""}),
    ("max_new_tokens", {"prompt": "It ", "max_tokens": 5000}),
    ("max_new_tokens", {"prompt": "It ", "max_tokens": 5000, "stream": True}),
    ("temperature", {"prompt": "It ", "temperature": -1.0}),
    ("top_p", {"prompt": "It ", "top_p": "most"}),
    ("seed", {"prompt": "It ", "seed": "one"}),
    ("stop", {"prompt": "It ", "stop": [""]}),
    ("logit_bias", {"prompt": "It ", "logit_bias": {"999": 1.0}}),
    ("best_of", {"prompt": "It ", "best_of": 2}),
    ("", ["It was"]),
]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(files("torch_specops") / "data" / "austen_bytes" / "target")


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    folder = files("torch_specops") / "data" / "austen_bytes"
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft"))
    return SpeculativeDecoder(target, draft, num_draft_tokens=4)


@contextmanager
def serving(example: dict[str, Any], decoder: SpeculativeDecoder, tokenizer: Any) -> Iterator[tuple[Any, list[Handle]]]:
    """The server, and the handles of the requests that it gets."""
    handles: list[Handle] = []
    with decoder.session(3, max_length=1024) as session, example["Server"](0, session, tokenizer) as server:
        submit = session.submit

        def remembered(request: Any) -> Handle:
            handles.append(submit(request))
            return handles[-1]

        session.submit = remembered  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server, handles
        finally:
            server.shutdown()
            thread.join(WAIT)


@contextmanager
def posted(address: tuple[str, int], body: Any) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection(*address, timeout=WAIT)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        yield connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The data of server-sent events up to the end."""
    for line in iter(response.readline, b"data: [DONE]\n"):
        assert line.startswith(b"data: ") and response.readline() == b"\n"
        yield json.loads(line[6:])
    assert response.read() == b"\n"


def alone(decoder: SpeculativeDecoder, tokenizer: Any, body: Body) -> tuple[str, str]:
    """Text and finish reason of a request by itself."""
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
    output = decoder.generate(
        tokenizer(body["prompt"], return_tensors="pt")["input_ids"],
        max_new_tokens=body["max_tokens"],
        sampling=SamplingParams(**{name: body[name] for name in names if name in body}, logit_bias=bias),
        seed=body.get("seed"),
        stop_strings=body.get("stop"),
        tokenizer=tokenizer,
    )
    return tokenizer.decode(output.new_tokens(0)), str(output.finish_reasons[0])


def ask(server: Any, body: Body, stream: bool) -> tuple[str, str]:
    """Text and finish reason, as the server gives them."""
    with posted(server.server_address, body | {"model": "any", "stream": stream}) as response:
        assert response.status == 200
        answers = list(events(response)) if stream else [json.loads(response.read())]
    *deltas, last = answers
    assert len({answer["id"] for answer in answers}) == 1
    assert all(answer["object"] == "text_completion" for answer in answers)
    assert all(delta["choices"][0]["finish_reason"] is None for delta in deltas)
    assert not stream or len(deltas) > 1
    text = "".join(answer["choices"][0]["text"] for answer in answers)
    return text, last["choices"][0]["finish_reason"]


def leave(server: Any, when: str) -> None:
    """Ask for a long text, and disconnect."""
    if when == "at once":
        with socket.create_connection(server.server_address) as connection:
            content = json.dumps(LONG).encode()
            connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    else:
        with posted(server.server_address, LONG | {"stream": True}) as response:
            for _ in zip(range(3), events(response), strict=False):
                pass


def cancelled(handles: list[Handle]) -> list[Completion]:
    completions = [handle.result() for handle in handles if handle.done]
    return [completion for completion in completions if completion.finish_reason == "cancelled"]


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refuse(server: Any, name: str, body: Any) -> None:
    with posted(server.server_address, body) as response:
        answer = json.loads(response.read())
        assert response.status == 400 and name in answer["error"]["message"], (body, answer)


def test_every_client_gets_its_own_text(
    example: dict[str, Any], decoder: SpeculativeDecoder, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []
    connect = socket.socket.connect

    def recorded(self: socket.socket, address: Any) -> None:
        addresses.append(address[0])
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", recorded)
    expected = [alone(decoder, tokenizer, body) for body in REQUESTS]
    assert len({text for text, _ in expected}) > 20 and {reason for _, reason in expected} == {"length", "stop"}
    assert any("é" in text and "\ufffd" not in text for text, _ in expected)
    jobs: dict[Any, Any] = {}
    with serving(example, decoder, tokenizer) as (server, handles), ThreadPoolExecutor(8) as pool:
        calls: list[Any] = [partial(ask, server, body, place % 2 > 0) for place, body in enumerate(REQUESTS)]
        calls += [partial(leave, server, when) for when in ("at once", "later") * 3]
        calls += [partial(refuse, server, name, body) for name, body in WRONG]
        assert len(calls) == 50
        for place in random.Random(0).sample(range(50), 50):
            jobs[place] = pool.submit(calls[place])
        found = [jobs[place].result(WAIT) for place in range(50)]
        assert found[: len(REQUESTS)] == expected
        # The server may not yet have read what a client sent before it left.
        wait_until(lambda: len(cancelled(handles)) == 6 and server.session.is_idle)
    text, _ = alone(decoder, tokenizer, LONG | {"max_tokens": 40})
    for completion in cancelled(handles):
        assert len(completion.new_tokens) < 600
        assert tokenizer.decode(completion.new_tokens[:40]) == text[: len(completion.new_tokens)]
    assert set(addresses) == {"127.0.0.1"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_errors_of_the_server(example: dict[str, Any], decoder: SpeculativeDecoder, tokenizer: Any) -> None:
    with serving(example, decoder, tokenizer) as (server, _):
        # An error of the model ends the session.
        for stream, message in ((False, "out of order"), (True, "the session is closed")):
            broken = mock.patch.object(decoder.target, "forward", side_effect=RuntimeError("out of order"))
            with broken, posted(server.server_address, REQUESTS[0] | {"stream": stream}) as response:
                assert response.status == 500 and message in json.loads(response.read())["error"]["message"]


def test_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (EXAMPLE.parents[1] / "docs" / "serving.md").read_text()
    found = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    exec(found[1], {})
    assert capsys.readouterr().out == found[2]


def test_an_interrupt_closes_the_server(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    main, before, addresses = example["main"], threading.active_count(), SimpleQueue[str]()
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--port", "0"])
    monkeypatch.setitem(main.__globals__, "print", lambda text, flush: addresses.put(text))
    # A process that a shell starts in the background ignores the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> Any:
        port = int(addresses.get(timeout=WAIT).split(":")[2].split("/")[0])
        with posted(("127.0.0.1", port), LONG | {"stream": True}) as response:
            answers = events(response)
            next(answers)
            os.kill(os.getpid(), signal.SIGINT)
            return list(answers)[-1]

    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(interrupt)
        with pytest.raises(SystemExit) as end:
            typer.run(main)
        assert end.value.code == 0
        assert last.result(WAIT)["choices"][0]["finish_reason"] == "cancelled"
    wait_until(lambda: threading.active_count() <= before)
