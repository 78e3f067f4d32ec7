"""Serve completions over HTTP with OpenAI's field names; all requests share one session. Stop strings stay in the text.

python examples/server.py --port 8000
curl -N localhost:8000/v1/completions -d '{"prompt": "It was ", "max_tokens": 40, "seed": 1, "stream": true}'
"""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import chain

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Request, SamplingParams, SpeculativeDecoder


class Server(ThreadingHTTPServer):
    def __init__(self, port, session, tokenizer):
        super().__init__(("127.0.0.1", port), Handler)
        self.session, self.tokenizer = session, tokenizer
        threading.Thread(target=session.run).start()

    def submit(self, prompt, max_tokens=16, seed=None, stop=None, logit_bias=None, model=None, **sampling):
        biases = {int(token): bias for token, bias in dict(logit_bias or {}).items()}
        params, ids = SamplingParams(logit_bias=biases, **sampling), self.tokenizer(prompt)["input_ids"]
        return self.session.submit(Request(ids, max_tokens, params, seed, stop_strings=stop, tokenizer=self.tokenizer))

    def answers(self, handle, stream):
        """Deltas of whole characters; without `stream` None, which shows whether the client is there, then the text."""
        start, tokens, text, sent = {"id": f"cmpl-{handle.index}", "object": "text_completion"}, [], "", 0
        try:
            for token in handle.tokens():
                tokens.append(token)
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                new = "" if text.endswith("\ufffd") else text[sent:]
                sent += len(new)
                yield start | {"choices": [{"index": 0, "text": new, "finish_reason": None}]} if stream else None
            done = handle.result()
            if done.error is not None:
                raise (ValueError if done.seed is None else RuntimeError)(done.error)
            reason, rest = "stop" if done.finish_reason == "eos" else done.finish_reason, text[sent if stream else 0 :]
            yield start | {"choices": [{"index": 0, "text": rest, "finish_reason": reason}]}
        finally:
            handle.cancel()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            fields = dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            stream = fields.pop("stream", False)
            answers = self.server.answers(self.server.submit(**fields), stream)
            status, answer = 200, next(answers)
        except (RuntimeError, TypeError, ValueError) as error:
            status, stream, answers = 500 if isinstance(error, RuntimeError) else 400, False, ()
            answer = {"error": {"message": str(error)}}
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.end_headers()
            for each in chain([answer], answers):
                line = b" " if each is None else json.dumps(each).encode()
                self.wfile.write(b"data: %s\n\n" % line if stream else line)
            self.wfile.write(b"data: [DONE]\n\n" if stream else b"")


def main(folder: str = str(files("torch_specops") / "data" / "austen_bytes"), port: int = 8000, batch_size: int = 8):
    models = (AutoModelForCausalLM.from_pretrained(f"{folder}/{name}") for name in ("target", "draft"))
    session = SpeculativeDecoder(*models, num_draft_tokens=4).session(batch_size, max_length=1024)
    with session, Server(port, session, AutoTokenizer.from_pretrained(f"{folder}/target")) as server:
        print(f"http://127.0.0.1:{server.server_port}/v1/completions", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    typer.run(main)
