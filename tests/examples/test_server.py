"""examples/server.py: every client gets the text that `generate` gives its request alone, whatever the others do. And
the page on serving."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from tiny_tokenizers import byte_fallback
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Completion, SamplingParams, SpeculativeDecoder
from torch_specops.decode import Handle

web = pytest.importorskip("aiohttp.web")

EXAMPLE = Path(__file__).parents[2] / "examples" / "server.py"
WAIT = 30.0
Body = dict[str, Any]
Address = tuple[str, int]

# Its text is "ééé...", whose two bytes take turns; it may end inside a character.
ACCENTS = {"logit_bias": {"195": 200.0, "169": 190.0}, "frequency_penalty": 20.0, "temperature": 0.0}
SETTINGS: list[Body] = [
    {"temperature": 0},
    {"temperature": 0.0, "stop": [" the", "ing"], "model": "any", "n": 1, "logprobs": None, "user": "me"},
    {"temperature": 0.0, "logit_bias": {"101": -100}, "seed": None, "max_completion_tokens": None},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "seed": 2, "stop": "e "},
    {"seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"seed": 4, "temperature": 2.0},
    ACCENTS,
]
TEXTS = ["It was not to be ", "She had ", "Mr. Darcy said that he would "]
REQUESTS = [
    settings
    | ({"messages": [{"role": "user", "content": TEXTS[place % 3]}]} if place % 5 < 2 else {"prompt": TEXTS[place % 3]})
    | {"max_tokens": 12 + place % 9}
    for place, settings in enumerate(SETTINGS * 2)
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}It {% endif %}"
)
LONG = {"prompt": "In the morning ", "max_tokens": 900, "temperature": 0.0}
CHAT = [{"role": "user", "content": "It was"}]
# The error names the field.
WRONG: list[tuple[str, Any]] = [
    ("prompt", {}),
    ("prompt", {"prompt": ["It was"]}),
    ("prompt", {"prompt": ""}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "It was"}),
    ("messages", {"messages": [{"role": "user", "content": None}]}),
    ("prompt", {"messages": CHAT, "prompt": "It "}),
    *(("max_tokens", {"prompt": "It ", "max_tokens": value}) for value in (5000, 0, "7", 1.5, True)),
    ("max_tokens", {"prompt": "It ", "max_tokens": 5000, "stream": True}),
    ("max_tokens", {"prompt": "It " * 1000}),
    ("max_completion_tokens", {"messages": CHAT, "max_completion_tokens": 0}),
    ("temperature", {"prompt": "It ", "temperature": -1.0}),
    ("temperature", {"prompt": "It ", "temperature": -1.0, "stream": True}),
    ("top_p", {"prompt": "It ", "top_p": "most"}),
    ("top_k", {"prompt": "It ", "top_k": 5}),
    ("seed", {"prompt": "It ", "seed": "one"}),
    ("seed", {"prompt": "It ", "seed": 10**20}),
    *(("stop", {"prompt": "It ", "stop": value}) for value in ("", [""], list("abcde"), 5)),
    *(("logit_bias", {"prompt": "It ", "logit_bias": value}) for value in ({"999": 1.0}, {"a": 1}, {"9": "a"}, [])),
    ("logit_bias", {"prompt": "It ", "logit_bias": {str(token): 0 for token in range(301)}}),
    ("n", {"prompt": "It ", "n": True}),
    *(("n", {"prompt": "It ", "n": value}) for value in (0, 17, 1.0)),
    ("best_of", {"prompt": "It ", "best_of": 2}),
    *(("logprobs", {"prompt": "It ", "logprobs": value}) for value in (6, 0.0, False)),
    ("logprobs", {"messages": CHAT, "logprobs": 0}),
    ("top_logprobs", {"messages": CHAT, "logprobs": True, "top_logprobs": 6}),
    ("top_logprobs", {"messages": CHAT, "top_logprobs": 1}),
    ("tools", {"messages": CHAT, "tools": [{"type": "function"}]}),
    ("tool_calls", {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{}]}]}),
    ("image_url", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}),
    ("response_format", {"messages": CHAT, "response_format": {"type": "grammar"}}),
    ("response_format", {"messages": CHAT, "response_format": {"type": "json_object"}}),
    ("stream", {"prompt": "It ", "stream": "no"}),
    ("stream_options", {"prompt": "It ", "stream_options": {"more": True}}),
    ("body", ["It was"]),
    *(("body", each) for each in (b"", b"{", b'{"prompt": "\xff"}', b"[" * 50000, b'{"prompt": "\\ud800"}')),
]


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    # Python finds what stands beside a script; here "openai_forms.py".
    with mock.patch.object(sys, "path", [str(EXAMPLE.parent), *sys.path]):
        yield runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(files("torch_specops") / "data" / "austen_bytes" / "target")
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    folder = files("torch_specops") / "data" / "austen_bytes"
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft"))
    return SpeculativeDecoder(target, draft, num_draft_tokens=4)


@pytest.fixture
def serve(example: dict[str, Any], decoder: SpeculativeDecoder, tokenizer: Any) -> Any:
    """A context: the address of a server, and the handles of the requests that it gets."""

    @contextmanager
    def serving(tokenizer: Any = tokenizer, **options: Any) -> Iterator[tuple[Address, list[Handle]]]:
        handles: list[Handle] = []
        with (
            decoder.session(3, max_length=1024, logprobs="raw", top_logprobs=5) as session,
            ThreadPoolExecutor(1) as pool,
        ):
            submit = session.submit

            def remembered(request: Any) -> Handle:
                handles.append(submit(request))
                return handles[-1]

            session.submit = remembered  # type: ignore[method-assign]
            loop = asyncio.new_event_loop()
            server = example["Server"](session, tokenizer, "austen", 1024, has_logprobs=True, **options)
            runner = web.AppRunner(server.app, handler_cancellation=True)

            async def start() -> Address:
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                return runner.addresses[0]

            address = pool.submit(loop.run_until_complete, start()).result(WAIT)
            running = pool.submit(loop.run_forever)
            try:
                yield address, handles
            finally:
                asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(WAIT)
                loop.call_soon_threadsafe(loop.stop)
                running.result(WAIT)
                loop.close()
                # Sockets of clients that have left are collected here, not in another test.
                gc.collect()

    return serving


@contextmanager
def posted(
    address: Address, body: Any, path: str = "", headers: dict[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    path = path or "/v1/" + "chat/" * (isinstance(body, dict) and "messages" in body) + "completions"
    with closing(http.client.HTTPConnection(*address, timeout=WAIT)) as connection:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers or {})
        with connection.getresponse() as response:
            yield response


def answered(address: Address, body: Any) -> tuple[int, Any]:
    with posted(address, body) as response:
        return response.status, json.loads(response.read())


def healthy(address: Address) -> bool:
    with closing(http.client.HTTPConnection(*address, timeout=WAIT)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The data of server-sent events up to the end."""
    for line in iter(response.readline, b"data: [DONE]\n"):
        assert line.startswith(b"data: ") and response.readline() == b"\n"
        yield json.loads(line[6:])
    assert response.read() == b"\n"


def alone(decoder: SpeculativeDecoder, tokenizer: Any, body: Body) -> tuple[str, str, list[int]]:
    """Text, finish reason, and the numbers of tokens in prompt and text of a request by itself."""
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
    prompt = f"user: {body['messages'][0]['content']}\nIt " if "messages" in body else body["prompt"]
    output = decoder.generate(
        tokenizer(prompt, return_tensors="pt")["input_ids"],
        max_new_tokens=body["max_tokens"],
        sampling=SamplingParams(**{name: body[name] for name in names if name in body}, logit_bias=bias),
        seed=body.get("seed"),
    )
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
    # A token is a byte.
    text, length = tokenizer.decode(output.new_tokens(0)), len(prompt.encode())
    ends = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
    if ends:
        end, stop = min(ends)
        return text[: end - len(stop)], "stop", [length, end]
    return text, str(output.finish_reasons[0]), [length, len(output.new_tokens(0))]


def ask(address: Address, body: Body, stream: bool) -> tuple[str, str, list[int]]:
    """The same, as the server gives it."""
    with posted(address, body | {"stream": stream, "stream_options": {"include_usage": True}}) as response:
        assert response.status == 200
        answers = list(events(response)) if stream else [json.loads(response.read())]
    usage = answers[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if stream:
        assert answers.pop()["choices"] == [] and len(answers) > 1
    kind = "text_completion" if "prompt" in body else "chat.completion.chunk" if stream else "chat.completion"
    assert {(answer["object"], answer["id"]) for answer in answers} == {(kind, answers[0]["id"])}
    choices = [answer["choices"][0] for answer in answers]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    if "messages" in body:
        said = [choice["delta" if stream else "message"] for choice in choices]
        assert [each.get("role") for each in said] == ["assistant", *[None] * (len(said) - 1)]
        choices = [choice | {"text": each["content"]} for choice, each in zip(choices, said, strict=True)]
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"], [usage["prompt_tokens"], usage["completion_tokens"]]


def leave(address: Address, when: str) -> None:
    """Ask for a long text, and disconnect."""
    if when == "at once":
        with socket.create_connection(address) as connection:
            content = json.dumps(LONG).encode()
            connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    else:
        with posted(address, LONG | {"stream": True}) as response:
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


def test_every_client_gets_its_own_text(serve: Any, decoder: SpeculativeDecoder, tokenizer: Any) -> None:
    """While others leave, wait, and are refused. Of a text, a stop string and what may begin it is not sent, nor a part
    of a character."""
    expected = [alone(decoder, tokenizer, body) for body in REQUESTS]
    assert len({text for text, _, _ in expected}) > 12 and {reason for _, reason, _ in expected} == {"length", "stop"}
    assert any("é" in text and "\ufffd" not in text for text, _, _ in expected)
    jobs: dict[Any, Any] = {}
    with serve() as (address, handles), ThreadPoolExecutor(8) as pool:
        calls: list[Any] = [partial(ask, address, body, place % 2 > 0) for place, body in enumerate(REQUESTS)]
        calls += [partial(leave, address, when) for when in ("at once", "later") * 3]
        calls += [partial(answered, address, body) for _, body in WRONG]
        for place in random.Random(0).sample(range(len(calls)), len(calls)):
            jobs[place] = pool.submit(calls[place])
        found = [jobs[place].result(WAIT) for place in range(len(calls))]
        assert found[: len(REQUESTS)] == expected
        wait_until(lambda: all(handle.done for handle in handles))
    refused = zip(WRONG, found[-len(WRONG) :], strict=True)
    named = [(body, answer) for (name, body), (status, answer) in refused if status != 400 or name not in str(answer)]
    assert named == []
    left = [done for done in cancelled(handles) if len(done.tokens) - len(done.new_tokens) == len(LONG["prompt"])]
    # What a client sent that left at once may not even have been read.
    assert 3 <= len(left) <= 6
    text, _, _ = alone(decoder, tokenizer, LONG | {"max_tokens": 40})
    for completion in left:
        assert len(completion.new_tokens) < 600
        assert tokenizer.decode(completion.new_tokens[:40]) == text[: len(completion.new_tokens)]


def test_limits(serve: Any, tokenizer: Any) -> None:
    with serve(max_requests=3) as (address, handles), posted(address, LONG | {"stream": True}) as first:
        assert next(events(first))["choices"]
        with posted(address, LONG | {"stream": True}) as second, posted(address, LONG | {"stream": True}) as third:
            assert next(events(second))["choices"] and next(events(third))["choices"]
            status, answer = answered(address, REQUESTS[0])
            assert status == 429 and "requests" in answer["error"]["message"] and healthy(address)
        # Clients that leave make room.
        wait_until(lambda: len(cancelled(handles)) == 2)
        wait_until(lambda: answered(address, REQUESTS[0])[0] == 200)
        wrong = {
            413: ("/v1/completions", b" " * 200_000, {}),
            404: ("/v1/embeddings", b"{}", {}),
            400: ("/v1/completions", b"no gzip", {"Content-Encoding": "gzip"}),
        }
        for status, (path, body, headers) in wrong.items():
            with posted(address, body, path, headers) as response:
                error = json.loads(response.read())["error"]
                assert (response.status, error["code"], error["type"]) == (status, status, "invalid_request_error")
    with serve(max_seconds=0.2) as (address, handles):
        started = time.monotonic()
        statuses = [answered(address, LONG)[1]["choices"][0]["finish_reason"]]
        assert statuses == ["length"] and 0 < len(handles[0].result().new_tokens) < 900
        # Rows are taken for longer than the last of these may wait.
        with ThreadPoolExecutor(16) as clients:
            crowd = list(clients.map(answered, [address] * 16, [LONG] * 16))
        assert {status for status, _ in crowd} == {200, 504}
        assert {answer["error"]["code"] for status, answer in crowd if status == 504} == {504}
        # It sends only half of what it announces.
        with socket.create_connection(address, timeout=WAIT) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
            connection.recv(1000)
        assert time.monotonic() - started < WAIT / 2 and len(handles) == 17
        tokenizer.chat_template, template = None, tokenizer.chat_template
        try:
            status, answer = answered(address, {"messages": CHAT})
            assert status == 400 and "this model has no chat template" in answer["error"]["message"]
        finally:
            tokenizer.chat_template = template


def test_what_clients_send(serve: Any) -> None:
    """Content in parts, no content, empty tools, and what comes with an answer."""
    plain = [{"role": "user", "content": "It\nwas"}, {"role": "assistant", "content": ""}]
    parts = [{"type": "text", "text": text} for text in ("It", "was")]
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []}
    sent = {"messages": [{"role": "user", "content": parts}, answer], "tools": [], "response_format": {"type": "text"}}
    rest = {"max_tokens": 20, "temperature": 0.0}
    with serve() as (address, _):
        expected = answered(address, {"messages": plain} | rest)[1]["choices"]
        assert expected[0]["message"]["content"]
        assert answered(address, sent | rest)[1]["choices"] == expected


def test_choices_and_their_logprobs(serve: Any, decoder: SpeculativeDecoder, tokenizer: Any) -> None:
    """As `num_return_sequences` and `logprobs` of `generate` have them, streamed or not."""
    prompt, text = "It was not to be ", "user: She\nIt "
    for body, start in (
        ({"prompt": prompt, "logprobs": 2}, prompt),
        ({"messages": [{"role": "user", "content": "She"}]}, text),
    ):
        is_chat = "messages" in body
        body |= {"n": 3, "seed": 5, "max_tokens": 9} | ({"logprobs": True, "top_logprobs": 2} if is_chat else {})
        ids = tokenizer([start])["input_ids"]
        how: Any = {"num_return_sequences": 3, "logprobs": "raw", "top_logprobs": 5, "seed": 5, "max_new_tokens": 9}
        output = decoder.generate(ids, **how)
        new, start_at = [output.new_tokens(row) for row in range(3)], len(ids[0])
        assert output.logprobs is not None and output.top_logprobs is not None and len(set(map(tuple, new))) == 3
        with serve() as (address, _):
            whole = answered(address, body)[1]
            with posted(address, body | {"stream": True}) as response:
                choices = [answer["choices"][0] for answer in events(response)]
        assert whole["usage"] == {"prompt_tokens": start_at, "completion_tokens": 27, "total_tokens": start_at + 27}
        last = [choice for choice in choices if choice["finish_reason"]]
        for row, choice in enumerate(whole["choices"]):
            pieces = [each["delta"]["content"] if is_chat else each["text"] for each in choices if each["index"] == row]
            shown = choice["message"]["content"] if is_chat else choice["text"]
            assert choice["index"] == row and "".join(pieces) == shown == output.texts(tokenizer)[row]
            # A token is a byte of ASCII.
            tokens, best = new[row], output.top_logprobs.tokens[row, start_at:, :2].tolist()
            for found in (choice["logprobs"], *(each["logprobs"] for each in last if each["index"] == row)):
                if is_chat:
                    entries = found["content"]
                    assert [each["bytes"] for each in entries] == [[token] for token in tokens]
                    assert [[top["bytes"][0] for top in each["top_logprobs"]] for each in entries] == best
                    values = [each["logprob"] for each in entries]
                else:
                    assert found["tokens"] == list(map(chr, tokens)) and found["text_offset"] == list(range(9))
                    tops = [sorted(top, key=top.get, reverse=True) for top in found["top_logprobs"]]
                    assert tops == [list(map(chr, each)) for each in best]
                    values = found["token_logprobs"]
                assert values == pytest.approx(output.logprobs[row, start_at:].tolist(), abs=1e-4)


def test_json_for_a_schema(serve: Any) -> None:
    schema = {"type": "object", "properties": {"sister": {"enum": ["Jane", "Mary"]}}, "required": ["sister"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema | {"additionalProperties": False}},
    }
    body = {"messages": CHAT, "n": 2, "seed": 1, "max_tokens": 60}
    with serve(eos=[0]) as (address, _):
        choices = answered(address, body | {"response_format": form})[1]["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
        assert all(json.loads(choice["message"]["content"])["sister"] in ("Jane", "Mary") for choice in choices)
        (choice, _) = answered(address, body | {"response_format": {"type": "json_object"}})[1]["choices"]
        assert choice["message"]["content"].startswith("{")
        # A keyword that the library does not know, and no schema.
        for wrong in ({"type": "json_schema"}, form | {"json_schema": {"name": "a", "schema": {"not": {}}}}):
            status, answer = answered(address, body | {"response_format": wrong})
            assert status == 400 and "response_format: " in answer["error"]["message"]


def test_text_keeps_its_spaces(serve: Any, decoder: SpeculativeDecoder) -> None:
    """Those of SentencePiece: the first, and one after a token without text. A stop string may come in the last token,
    before half a character."""
    # Frequent letters become a token without text, two bytes of a character, and a space.
    letters = {"o": "<unk>", "t": "<0xC3>", "h": "<0xA9>", " ": "▁", "n": "▁é"}
    words, ids = byte_fallback([letters.get(chr(token), f"▁w{token}") for token in range(256)]), list(b"It was")
    output = decoder.generate([ids], max_new_tokens=30, sampling=SamplingParams(temperature=0.0))
    texts = [replace(output, lengths=output.prompt_lengths + count).texts(words)[0] for count in range(31)]
    halves = [count for count, text in enumerate(texts) if text.endswith("\ufffd") and text[-2] != "\ufffd"]
    assert texts[1].startswith(" ") and "é" in texts[-1] and len(halves) > 1
    body = {"prompt": "any", "max_tokens": 30, "temperature": 0.0}
    with serve(words) as (address, _), mock.patch.object(type(words), "__call__", return_value={"input_ids": ids}):
        assert [ask(address, body, stream)[0] for stream in (False, True)] == [texts[-1]] * 2
        for count in halves[:2]:
            text, stop = texts[count], texts[count][-4:-1]
            assert ask(address, body | {"max_tokens": count, "stop": stop}, False)[0] == text[: text.index(stop)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_model(serve: Any, decoder: SpeculativeDecoder) -> None:
    """It ends the session: every request is told, and the server says that it works no more."""
    with serve() as (address, _), posted(address, LONG | {"stream": True}) as response:
        answers = events(response)
        assert healthy(address) and next(answers)["choices"]
        with mock.patch.object(decoder.target, "forward", side_effect=RuntimeError("out of order")):
            with suppress(StopIteration, AssertionError):
                while "error" not in (last := next(answers)):
                    pass
            assert "out of order" in last["error"]["message"]
        wait_until(lambda: not healthy(address))
        status, answer = answered(address, REQUESTS[0])
        assert status == 503 and "the session is closed" in answer["error"]["message"]


def test_the_client_of_openai(serve: Any, decoder: SpeculativeDecoder, tokenizer: Any) -> None:
    openai = pytest.importorskip("openai")
    body = {"max_tokens": 12, "temperature": 0.0, "seed": 1}
    expected, _, _ = alone(decoder, tokenizer, body | {"messages": CHAT})
    with serve() as (address, _), openai.OpenAI(base_url="http://{}:{}/v1".format(*address), api_key="any") as client:
        (model,) = client.models.list()
        settings = body | {"model": model.id}
        said = client.chat.completions.create(messages=CHAT, **settings)
        assert (said.choices[0].message.content, said.usage.completion_tokens) == (expected, 12)
        parts = list(client.chat.completions.create(messages=CHAT, stream=True, **settings))
        assert "".join(part.choices[0].delta.content for part in parts) == expected
        with client.chat.completions.stream(messages=CHAT, stop=" ", **settings) as stream:
            assert stream.get_final_completion().choices[0].message.content == expected.partition(" ")[0]
        text = client.completions.create(prompt="user: It was\nIt ", **settings).choices[0].text
        assert text == expected
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.completions.create(prompt="It ", top_p=7.0, **settings)


def test_help_says_what_each_option_is(example: dict[str, Any]) -> None:
    app = typer.Typer()
    app.command()(example["main"])
    options: list[Any] = typer.main.get_command(app).params
    assert len(options) > 5 and [option.name for option in options if not option.help] == []


# asyncio does not close a connection that comes while the server stops listening.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_drains_the_server(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run or wait for a row end whole, new ones are not taken, and the process ends without an error."""

    def num_threads() -> int:
        # tqdm's is a daemon, and stays.
        return sum(not thread.daemon for thread in threading.enumerate())

    before = num_threads()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address: Address = free.getsockname()
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--port", str(address[1]), "--rows", "1"])
    body = LONG | {"max_tokens": 200, "stream": True}

    def is_up() -> bool:
        with suppress(ConnectionError):
            return healthy(address)
        return False

    def refused() -> bool:
        try:
            socket.create_connection(address).close()
        except ConnectionError:
            return True
        return False

    def clients() -> list[Any]:
        wait_until(is_up)
        with posted(address, body) as running, ThreadPoolExecutor(1) as pool:
            next(events(running))
            waiting = pool.submit(answered, address, body | {"stream": False})
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(refused)
            text = "".join(answer["choices"][0]["text"] for answer in events(running))
            answer = waiting.result(WAIT)[1]
            return [len(text), answer["usage"]["completion_tokens"], answer["model"]]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(clients)
        with pytest.raises(SystemExit) as end:
            typer.run(example["main"])
        assert end.value.code == 0 and found.result(WAIT) == [199, 200, "target"]
    wait_until(lambda: num_threads() <= before)
    # The traceback and asyncio keep the loop and its connections, which are collected here and not in another test.
    del end
    asyncio.set_event_loop(None)
    gc.collect()
