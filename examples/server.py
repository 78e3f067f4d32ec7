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
from pathlib import Path
from typing import Annotated

import openai_forms as forms
import torch
import typer
from aiohttp import web
from jinja2 import TemplateError
from llguidance.hf import from_tokenizer
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Request, SpeculativeDecoder, TextPieces, grammars
from torch_specops.drafts import PromptLookup
from torch_specops.ops.uniforms import row_seeds

TARGET, DRAFT = (str(files("torch_specops") / "data" / "austen_bytes" / name) for name in ("target", "draft"))
PATHS = {"/v1/completions": forms.COMPLETION, "/v1/chat/completions": forms.CHAT}


class Server:
    """`eos` are the target's eos tokens; with `has_logprobs` the session has raw logprobs and five top_logprobs.

    At most `max_requests` wait or run. A text is decoded for `max_seconds`, a request takes at most twice the time.
    """

    def __init__(
        self, session, tokenizer, name, max_length, eos=(), has_logprobs=False, max_requests=128, max_seconds=300.0
    ):
        self.session, self.tokenizer, self.name, self.max_length = session, tokenizer, name, max_length
        self.eos, self.has_logprobs, self.max_seconds = list(eos), has_logprobs, max_seconds
        self.pieces = partial(TextPieces, tokenizer, clean_up_tokenization_spaces=False)
        self.for_grammars = from_tokenizer(tokenizer, eos_token=self.eos) if self.eos else None
        self.places, self.steps = asyncio.Semaphore(max_requests), threading.Thread(target=session.run)
        # A prompt that fits has few bytes for each token.
        self.app = web.Application(client_max_size=2**12 + 2**6 * max_length)
        self.app.add_routes([web.get(path, self.describe) for path in ("/health", "/v1/models")])
        self.app.add_routes([web.route("*", "/{path:.*}", self.answer)])
        self.steps.start()

    async def describe(self, request):
        works, model = self.steps.is_alive(), {"id": self.name, "object": "model"}
        return web.json_response({"object": "list", "data": [model], "works": works}, status=200 if works else 503)

    async def answer(self, request):
        """Limit requests and their time. A client that leaves cancels this task, which cancels the request."""
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if self.places.locked():
                raise web.HTTPTooManyRequests(text="too many requests wait or run")
            async with self.places:
                return await asyncio.wait_for(self.complete(request, stream), 2 * self.max_seconds)
        except ConnectionError:
            return stream
        except web.HTTPException as error:
            status, message = error.status, error.text
        except ValidationError as error:
            last, status = error.errors()[-1], 400
            message = f"{'.'.join(map(str, last['loc'])) or 'body'}: {last['msg']}"
        except (asyncio.TimeoutError, RuntimeError) as error:
            status, message = 503 if isinstance(error, RuntimeError) else 504, str(error) or "it took too long"
        except (web.RequestPayloadError, TemplateError, TypeError, ValueError) as error:
            status, message = 400, str(error)
        kind = "invalid_request_error" if status < 500 else "server_error"
        failure = {"error": {"message": message, "type": kind, "param": None, "code": status}}
        if stream.prepared:
            await stream.write(b"data: %s\n\n" % json.dumps(failure).encode())
        return stream if stream.prepared else web.json_response(failure, status=status)

    async def complete(self, request, stream):
        form = PATHS.get(request.path)
        if form is None or request.method != "POST":
            raise web.HTTPNotFound(text=f"there is no {request.method} {request.path}")
        given, ids, texts = await asyncio.to_thread(self.read, form, await request.read())
        is_chat, room = form is forms.CHAT, self.max_length - len(ids)
        limit = given.max_completion_tokens or given.max_tokens or (room if is_chat else min(room, 16))
        if not 1 <= limit <= room:
            raise ValueError(f"max_tokens, max_completion_tokens: got {limit}, a prompt of {len(ids)} leaves {room}")
        sampling = given.model_dump(include=set(forms.SAMPLING), exclude_none=True)
        ask = partial(Request, ids, limit, sampling, eos_token_id=self.eos, max_time=self.max_seconds)
        handles = [self.session.submit(ask(**text)) for text in texts]
        kind = "chat.completion" + ".chunk" * bool(given.stream) if is_chat else "text_completion"
        start = {"id": f"request-{handles[0].index}", "object": kind, "created": int(time.time()), "model": self.name}
        lock = asyncio.Lock()

        async def send(**answer):
            async with lock:
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

    def read(self, form, body):
        """The fields, the prompt's tokens, and what each of the n texts has alone."""
        given = form.model_validate_json(body)
        n, grammar = given.n or 1, getattr(given, "response_format", None)
        if forms.num_top_logprobs(given) is not None and not self.has_logprobs:
            raise ValueError("logprobs: this server has none; start it with --logprobs")
        if grammar and not self.eos:
            raise ValueError("response_format: this model has no eos token to end JSON with")
        if form is forms.COMPLETION:
            ids = self.tokenizer(given.prompt)["input_ids"]
        elif not self.tokenizer.chat_template:
            raise ValueError("messages: this model has no chat template; use /v1/completions")
        else:
            messages = forms.messages_of(given)
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        # As num_return_sequences has them.
        seeds = [None] * n if given.seed is None else row_seeds(given.seed, n)[:, None]
        state = partial(grammars.llguidance, self.for_grammars)
        return given, ids, [{"seed": seed, "grammar": state(grammar) if grammar else None} for seed in seeds]

    async def follow(self, given, ids, send, index, handle):
        """Send a choice in pieces, if there is a `send`. Returns the whole choice, and how many tokens it has."""
        pieces, text, count = self.pieces(ids, eos_token_id=self.eos, stop_strings=given.stop or ()), "", 0

        def choice(content, reason=None, logprobs=None):
            # Only the first piece of a message has the role.
            said = {"content": content} | ({} if send and text != content else {"role": "assistant"})
            said = {"delta" if send else "message": said} if isinstance(given, forms.CHAT) else {"text": content}
            return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

        async for token in handle:
            new, count = pieces.push(token), count + 1
            text += new
            if send and new:
                await send(choices=[choice(new)])
            if pieces.stopped:
                handle.cancel()
                break
        completion, rest = await handle, pieces.end()
        if not pieces.stopped and (completion.error or completion.finish_reason == "cancelled"):
            kind = ValueError if completion.seed is None else RuntimeError
            raise kind(completion.error or "the server ends")
        text, logprobs = text + rest, None
        if forms.num_top_logprobs(given) is not None:
            logprobs = await asyncio.to_thread(forms.logprobs_of, given, completion, count, partial(self.text_of, ids))
        reason = "stop" if pieces.stopped or completion.finish_reason == "eos" else "length"
        last = choice(rest if send else text, reason, logprobs)
        if send:
            await send(choices=[last])
        return last, count

    def text_of(self, ids, before, token):
        pieces = self.pieces(ids + before, skip_special_tokens=False)
        return pieces.push(token) + pieces.end()


def main(
    target: Annotated[str, typer.Option(help="A folder, or an id on the Hugging Face hub.")] = TARGET,
    draft: Annotated[str, typer.Option(help="A folder, an id on the hub, prompt-lookup, or none.")] = DRAFT,
    port: Annotated[int, typer.Option(help="Listen on this port of 127.0.0.1.")] = 8000,
    rows: Annotated[int, typer.Option(help="The most texts to decode at once. Other requests wait.")] = 8,
    max_length: Annotated[int, typer.Option(help="The most tokens of a prompt and its text.")] = 1024,
    logprobs: Annotated[bool, typer.Option(help="Take requests for logprobs. Every step then takes longer.")] = False,
):
    """Serve OpenAI's chat completions and completions on 127.0.0.1."""
    # A target spread over several devices is refused.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = partial(AutoModelForCausalLM.from_pretrained, device_map=device)
    model, tokenizer = load(target), AutoTokenizer.from_pretrained(target)
    source = PromptLookup() if draft == "prompt-lookup" else None if draft == "none" else load(draft)
    decoder, settings = SpeculativeDecoder(model, source, num_draft_tokens=4), {"max_length": max_length}
    if logprobs:
        settings |= {"logprobs": "raw", "top_logprobs": 5}
    eos = model.generation_config.eos_token_id
    eos = [eos] if isinstance(eos, int) else eos or []
    name = Path(target).resolve().name if Path(target).exists() else target
    with decoder.session(rows, **settings) as session:
        app = Server(session, tokenizer, name, max_length, eos, logprobs).app
        web.run_app(app, host="127.0.0.1", port=port, shutdown_timeout=600.0, handler_cancellation=True)


if __name__ == "__main__":
    typer.run(main)
