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
from typing import Annotated, Literal

import typer
from aiohttp import web
from jinja2 import TemplateError
from pydantic import Field, ValidationError, conlist, constr, create_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Request, SpeculativeDecoder
from torch_specops.drafts import PromptLookup

TARGET, DRAFT = (str(files("torch_specops") / "data" / "austen_bytes" / name) for name in ("target", "draft"))
STRING, STRICT = constr(min_length=1), {"extra": "forbid", "strict": True}
SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
ALLOWED = dict.fromkeys(SAMPLING, float) | {"logit_bias": Annotated[dict[int, float], Field(max_length=300)]}
ALLOWED |= {"model": str, "user": str, "seed": int, "max_tokens": int, "max_completion_tokens": int, "stream": bool}
ALLOWED |= {"stop": STRING | conlist(STRING, max_length=4), "stream_options": dict[Literal["include_usage"], bool]}
ALLOWED |= {"n": Literal[1], "logprobs": Literal[False]}
ALLOWED = {name: (kind | None, None) for name, kind in ALLOWED.items()}
TEXTS = {"prompt": STRING, "messages": conlist(dict[Literal["role", "content", "name"], str], min_length=1)}
FIELDS = {name: create_model(name, __config__=STRICT, **ALLOWED, **{name: (kind, ...)}) for name, kind in TEXTS.items()}


class Server:
    def __init__(self, session, tokenizer, name, max_length, max_requests=128, max_seconds=300.0):
        self.session, self.name, self.max_length, self.max_seconds = session, name, max_length, max_seconds
        self.ids = {"prompt": tokenizer, "messages": partial(tokenizer.apply_chat_template, add_generation_prompt=True)}
        self.decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.places, self.steps = asyncio.Semaphore(max_requests), threading.Thread(target=session.run)
        # A prompt that fits has few bytes for each token.
        self.app = web.Application(client_max_size=2**12 + 2**6 * max_length)
        self.app.add_routes([web.get(path, self.describe) for path in ("/health", "/v1/models")])
        self.app.add_routes([web.post(f"/v1/{path}", self.answer) for path in ("completions", "chat/completions")])
        self.steps.start()

    async def describe(self, request):
        works, model = self.steps.is_alive(), {"id": self.name, "object": "model"}
        return web.json_response({"object": "list", "data": [model], "works": works}, status=200 if works else 503)

    async def answer(self, request):
        """Limit requests and their time. A client that leaves cancels this task, which cancels the request."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if not self.places.locked():
                async with self.places:
                    return await asyncio.wait_for(self.complete(request, response), 2 * self.max_seconds)
            status, message = 429, "too many requests wait or run"
        except ConnectionError:
            return response
        except ValidationError as error:
            first, status = error.errors()[0], 400
            message = f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
        except (asyncio.TimeoutError, TemplateError, TypeError, ValueError, RuntimeError) as error:
            status, message = {asyncio.TimeoutError: 504, RuntimeError: 503}.get(type(error), 400), str(error) or "late"
        failure = {"error": {"message": message, "type": "error", "param": None, "code": status}}
        if response.prepared:
            await response.write(b"data: %s\n\n" % json.dumps(failure).encode())
        return response if response.prepared else web.json_response(failure, status=status)

    async def complete(self, request, response):
        field = "messages" if "chat" in request.path else "prompt"
        given = FIELDS[field].model_validate_json(await request.read()).model_dump(exclude_none=True)
        is_chat, stream, stops = field == "messages", given.get("stream"), given.get("stop", [])
        ids = (await asyncio.to_thread(self.ids[field], given[field]))["input_ids"]
        room, sampling = self.max_length - len(ids), {name: given[name] for name in SAMPLING if name in given}
        limit = given.get("max_completion_tokens", given.get("max_tokens", room if is_chat else min(room, 16)))
        if not 1 <= limit <= room:
            raise ValueError(f"max_tokens, max_completion_tokens: got {limit}, a prompt of {len(ids)} leaves {room}")
        handle = self.session.submit(Request(ids, limit, sampling, given.get("seed"), max_time=self.max_seconds))
        text, kind = "", "chat.completion" + ".chunk" * bool(stream) if is_chat else "text_completion"
        start = {"id": f"request-{handle.index}", "object": kind, "created": int(time.time()), "model": self.name}
        async for new, reason, count in self.pieces(handle, [stops] if isinstance(stops, str) else stops):
            text += new
            said = {"content": new if stream else text} | ({} if response.prepared else {"role": "assistant"})
            choice = {"delta" if stream else "message": said} if is_chat else {"text": said["content"]}
            answer = start | {"choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": reason}]}
            usage = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
            if stream and (new or reason):
                await response.prepare(request)
                await response.write(b"data: %s\n\n" % json.dumps(answer).encode())
        if not stream:
            return web.json_response(answer | {"usage": usage})
        if given.get("stream_options", {}).get("include_usage"):
            await response.write(b"data: %s\n\n" % json.dumps(start | {"choices": [], "usage": usage}).encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def pieces(self, handle, stops):
        """Text in whole characters, without what may begin a stop string; why it ends; the number of tokens."""
        tokens, shown, read, text, held = [], 0, 0, "", max(map(len, stops), default=1) - 1
        async for token in handle:
            tokens.append(token)
            before, now = self.decode(tokens[shown:read]), self.decode(tokens[shown:])
            if not now.endswith("\ufffd") or len(tokens) > read + 64:
                text, shown, read = text + now[len(before) :], read, len(tokens)
            ends = [text.index(stop) for stop in stops if stop in text]
            end = min(ends, default=max(len(text) - held, 0))
            yield text[:end], "stop" if ends else None, len(tokens)
            if ends:
                return
            text = text[end:]
        done = await handle
        if done.error or done.finish_reason == "cancelled":
            raise (ValueError if done.seed is None else RuntimeError)(done.error or "the server ends")
        text += self.decode(tokens[shown:])[len(self.decode(tokens[shown:read])) :]
        yield text, "stop" if done.finish_reason == "eos" else "length", len(tokens)


def main(target: str = TARGET, draft: str = DRAFT, port: int = 8000, rows: int = 8, max_length: int = 1024):
    load = partial(AutoModelForCausalLM.from_pretrained, device_map="auto")
    source = PromptLookup() if draft == "prompt-lookup" else None if draft == "none" else load(draft)
    with SpeculativeDecoder(load(target), source, num_draft_tokens=4).session(rows, max_length=max_length) as session:
        app = Server(session, AutoTokenizer.from_pretrained(target), target, max_length).app
        web.run_app(app, host="127.0.0.1", port=port, shutdown_timeout=600.0, handler_cancellation=True)


if __name__ == "__main__":
    typer.run(main)
