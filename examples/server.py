"""Serve OpenAI's chat completions and completions over HTTP, streamed or not. All requests share one session.

python examples/server.py [--target FOLDER_OR_HUB_ID --draft prompt-lookup --max-length 8192]
curl -N localhost:8000/v1/completions -d '{"prompt": "It was ", "max_tokens": 40, "seed": 1, "stream": true}'
"""

import asyncio
import json
import threading
import time
from functools import partial
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from aiohttp import web
from jinja2 import TemplateError
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from pydantic import AfterValidator, Field, ValidationError, conint, conlist, constr, create_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Request, SpeculativeDecoder, TextPieces, grammars
from torch_specops.drafts import PromptLookup
from torch_specops.ops.uniforms import row_seeds

TARGET, DRAFT = (str(files("torch_specops") / "data" / "austen_bytes" / name) for name in ("target", "draft"))


def fields(optional, **required):
    """The fields of a JSON object; optional ones may be null, and others are refused."""
    kinds = {name: (kind | None, None) for name, kind in optional.items()}
    kinds |= {name: (kind, ...) for name, kind in required.items()}
    return create_model("Fields", __config__={"extra": "forbid", "strict": True}, **kinds)


def grammar_of(form):
    """A grammar of llguidance for a response format; None allows any text."""
    schema = {"type": "object"} if form.type == "json_object" else (form.json_schema or {}).get("schema")
    if form.type == "text":
        return None
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    if problem := LLMatcher.validate_grammar(grammar):
        raise ValueError(problem)
    return grammar


STRING, NOTHING = constr(min_length=1), conlist(Any, max_length=0)
SAMPLING = dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), float)
SAMPLING |= {"logit_bias": Annotated[dict[int, float], Field(max_length=300)]}
BODY = SAMPLING | {"model": str, "user": str, "stream": bool, "stream_options": dict[Literal["include_usage"], bool]}
BODY |= dict.fromkeys(("max_tokens", "max_completion_tokens"), conint(ge=1)) | {"n": conint(ge=1, le=16)}
BODY |= {"seed": conint(ge=-(2**63), lt=2**63), "stop": STRING | conlist(STRING, max_length=4)}
PARTS = conlist(fields({}, type=Literal["text"], text=str), min_length=1)
CONTENT = str | Annotated[PARTS, AfterValidator(lambda parts: "\n".join(part.text for part in parts))]
# Clients send these back with an answer.
ANSWER = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "annotations"), NOTHING)
ASSISTANT = fields({"content": CONTENT, "name": str} | ANSWER, role=Literal["assistant"])
MESSAGES = conlist(ASSISTANT | fields({"name": str}, role=str, content=CONTENT), min_length=1)
SCHEMA = dict[Literal["name", "description", "schema", "strict"], Any]
FORMAT = fields({"json_schema": SCHEMA}, type=Literal["text", "json_object", "json_schema"])
CHAT = BODY | {"response_format": Annotated[FORMAT, AfterValidator(grammar_of)], "tools": NOTHING}
CHAT = fields(CHAT | {"logprobs": bool, "top_logprobs": conint(ge=0, le=5)}, messages=MESSAGES)
COMPLETION = fields(BODY | {"logprobs": conint(ge=0, le=5)}, prompt=STRING)


class Server:
    """For a session with five top_logprobs; `eos` are the target's eos tokens."""

    def __init__(self, session, tokenizer, name, max_length, eos=(), max_requests=128, max_seconds=300.0):
        self.session, self.tokenizer, self.name, self.max_length = session, tokenizer, name, max_length
        self.pieces = partial(TextPieces, tokenizer, eos_token_id=eos, clean_up_tokenization_spaces=False)
        self.llguidance = partial(grammars.llguidance, from_tokenizer(tokenizer, eos_token=eos)) if eos else None
        self.request = partial(Request, eos_token_id=eos, max_time=max_seconds)
        self.places, self.steps = asyncio.Semaphore(max_requests), threading.Thread(target=session.run)
        self.max_seconds = max_seconds
        # A prompt that fits has few bytes for each token.
        self.app = web.Application(client_max_size=2**12 + 2**6 * max_length)
        self.app.add_routes([web.get(path, self.describe) for path in ("/health", "/v1/models")])
        self.app.add_routes([web.route("*", "/{path:.*}", self.guard)])
        self.steps.start()

    async def describe(self, request):
        works, model = self.steps.is_alive(), {"id": self.name, "object": "model"}
        return web.json_response({"object": "list", "data": [model], "works": works}, status=200 if works else 503)

    async def guard(self, request):
        """Limit requests and their time. A client that leaves cancels this task, which cancels the request."""
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if self.places.locked():
                raise web.HTTPTooManyRequests(text="too many requests wait or run")
            async with self.places:
                return await asyncio.wait_for(self.answer(request, stream), 2 * self.max_seconds)
        except ConnectionError:
            return stream
        except (web.HTTPException, web.RequestPayloadError) as error:
            status, message = getattr(error, "status", 400), getattr(error, "text", f"body: {error}")
        except ValidationError as error:
            last, status = error.errors()[-1], 400
            message = f"{'.'.join(map(str, last['loc'])) or 'body'}: {last['msg']}"
        except (asyncio.TimeoutError, TemplateError, TypeError, ValueError, RuntimeError) as error:
            status, message = {asyncio.TimeoutError: 504, RuntimeError: 503}.get(type(error), 400), str(error) or "late"
        kind = "invalid_request_error" if status < 500 else "server_error"
        failure = {"error": {"message": message, "type": kind, "param": None, "code": status}}
        if stream.prepared:
            await stream.write(b"data: %s\n\n" % json.dumps(failure).encode())
        return stream if stream.prepared else web.json_response(failure, status=status)

    async def answer(self, request, stream):
        if request.method != "POST" or request.path not in ("/v1/completions", "/v1/chat/completions"):
            raise web.HTTPNotFound(text=f"there is no {request.method} {request.path}")
        is_chat, body = "chat" in request.path, await request.read()
        given, ids, states = await asyncio.to_thread(self.read, is_chat, body)
        room = self.max_length - len(ids)
        limit = given.max_completion_tokens or given.max_tokens or (room if is_chat else min(room, 16))
        if not 1 <= limit <= room:
            raise ValueError(f"max_tokens, max_completion_tokens: got {limit}, a prompt of {len(ids)} leaves {room}")
        ask = partial(self.request, ids, limit, given.model_dump(include=set(SAMPLING), exclude_none=True))
        # As num_return_sequences has them.
        seeds = [None] * len(states) if given.seed is None else row_seeds(given.seed, len(states))[:, None]
        handles = [self.session.submit(ask(seed=seed, grammar=each)) for seed, each in zip(seeds, states, strict=True)]
        kind = "chat.completion" + ".chunk" * bool(given.stream) if is_chat else "text_completion"
        start = {"id": f"request-{handles[0].index}", "object": kind, "created": int(time.time()), "model": self.name}

        async def send(**answer):
            if not stream.prepared:
                await stream.prepare(request)
            await stream.write(b"data: %s\n\n" % json.dumps(start | answer).encode())

        follow = partial(self.follow, given, ids, send if given.stream else None)
        tasks = [asyncio.ensure_future(follow(*each)) for each in enumerate(handles)]
        try:
            choices, counts = zip(*await asyncio.gather(*tasks), strict=True)
        finally:
            for each in (*tasks, *handles):
                each.cancel()
        usage = {"prompt_tokens": len(ids), "completion_tokens": sum(counts), "total_tokens": len(ids) + sum(counts)}
        if not given.stream:
            return web.json_response(start | {"choices": choices, "usage": usage})
        if (given.stream_options or {}).get("include_usage"):
            await send(choices=[], usage=usage)
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def read(self, is_chat, body):
        """The fields, the tokens of the prompt, and a grammar or None for each choice."""
        given = (CHAT if is_chat else COMPLETION).model_validate_json(body)
        if not is_chat:
            return given, self.tokenizer(given.prompt)["input_ids"], [None] * (given.n or 1)
        grammar = given.response_format
        for message, is_refused in {
            "messages: this model has no chat template; use /v1/completions": not self.tokenizer.chat_template,
            "response_format: this model has no eos token to end JSON with": grammar and not self.llguidance,
            "top_logprobs: expected logprobs with it": given.top_logprobs and not given.logprobs,
        }.items():
            if is_refused:
                raise ValueError(message)
        messages = [
            {"content": ""} | each.model_dump(exclude=set(ANSWER), exclude_none=True) for each in given.messages
        ]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return given, ids, [self.llguidance(grammar) if grammar else None for _ in range(given.n or 1)]

    async def follow(self, given, ids, send, index, handle):
        """Send the pieces of a choice, if there is a `send`. Returns the choice, and how many tokens it has."""
        pieces, text, count = self.pieces(ids, stop_strings=given.stop or ()), "", 0

        def choice(content, reason=None, logprobs=None):
            said = {"content": content} | ({} if send and text != content else {"role": "assistant"})
            form = {"delta" if send else "message": said} if isinstance(given, CHAT) else {"text": content}
            return {"index": index, **form, "logprobs": logprobs, "finish_reason": reason}

        async for token in handle:
            new, count = pieces.push(token), count + 1
            text += new
            if send and new:
                await send(choices=[choice(new)])
            if pieces.stopped:
                handle.cancel()
                break
        done, rest = await handle, pieces.end()
        if not pieces.stopped and (done.error or done.finish_reason == "cancelled"):
            raise (ValueError if done.seed is None else RuntimeError)(done.error or "the server ends")
        text += rest
        reason = "stop" if pieces.stopped or done.finish_reason == "eos" else "length"
        last = choice(rest if send else text, reason, await asyncio.to_thread(self.logprobs, given, ids, done, count))
        if send:
            await send(choices=[last])
        return last, count

    def logprobs(self, given, ids, done, count):
        """OpenAI's form for the tokens that `usage` counts, or None."""
        is_chat, tokens, entries = isinstance(given, CHAT), done.new_tokens.tolist(), []
        if given.logprobs is None or given.logprobs is False:
            return None
        most = given.top_logprobs or 0 if is_chat else given.logprobs
        for place in range(count):
            top = zip(*(each[place, :most].tolist() for each in done.top_logprobs), strict=True)
            said = []
            for token, logprob in ((tokens[place], done.logprobs[place].item()), *top):
                pieces = self.pieces(ids + tokens[:place], skip_special_tokens=False)
                text = pieces.push(token) + pieces.end()
                as_bytes = None if "\ufffd" in text else list(text.encode())
                # JSON has no infinity.
                said.append({"token": text, "logprob": max(logprob, -9999.0), "bytes": as_bytes})
            entries.append(said[0] | {"top_logprobs": said[1:]})
        if is_chat:
            return {"content": entries}
        names, values = ([entry[name] for entry in entries] for name in ("token", "logprob"))
        tops = [{each["token"]: each["logprob"] for each in entry["top_logprobs"][::-1]} for entry in entries]
        places = [0, *accumulate(map(len, names))][:-1]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": places}


def main(
    target: Annotated[str, typer.Option(help="A folder, or an id on the Hugging Face hub.")] = TARGET,
    draft: Annotated[str, typer.Option(help="A folder, an id on the hub, prompt-lookup, or none.")] = DRAFT,
    port: Annotated[int, typer.Option(help="Listen on this port of 127.0.0.1.")] = 8000,
    rows: Annotated[int, typer.Option(help="The most texts to decode at once. Other requests wait.")] = 8,
    max_length: Annotated[int, typer.Option(help="The most tokens of a prompt and its text.")] = 1024,
):
    load = partial(AutoModelForCausalLM.from_pretrained, device_map="auto")
    source, model = (
        PromptLookup() if draft == "prompt-lookup" else None if draft == "none" else load(draft),
        load(target),
    )
    eos, name = model.generation_config.eos_token_id, Path(target).resolve().name if Path(target).exists() else target
    eos = [eos] if isinstance(eos, int) else eos or []
    decoder = SpeculativeDecoder(model, source, num_draft_tokens=4)
    with decoder.session(rows, max_length=max_length, logprobs="raw", top_logprobs=5) as session:
        app = Server(session, AutoTokenizer.from_pretrained(target), name, max_length, eos).app
        web.run_app(app, host="127.0.0.1", port=port, shutdown_timeout=600.0, handler_cancellation=True)


if __name__ == "__main__":
    typer.run(main)
