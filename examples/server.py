"""Serve completions over HTTP with the field names of OpenAI's API; all requests share the rows of one session.

python examples/server.py
curl -N localhost:8000/v1/completions -d '{"prompt": "It was ", "max_tokens": 40, "seed": 1, "stream": true}'

The other fields are stop, whose strings stay in the text, and those of `SamplingParams`. `model` is ignored.
"""

import argparse
import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import chain
from select import select
from socket import MSG_PEEK

from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Request, SamplingParams, SpeculativeDecoder


class Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, port, session, tokenizer):
        super().__init__(("127.0.0.1", port), Handler)
        self.session, self.tokenizer, self.connections = session, tokenizer, {}
        threading.Thread(target=session.run).start()

    def service_actions(self):
        """Cancel the requests of clients that have disconnected; `serve_forever` calls this after every wait."""
        for handle, connection in list(self.connections.items()):
            if handle.done:
                del self.connections[handle]
            # A connection that is closed at this moment raises; the next call sees that it is closed.
            with suppress(OSError, ValueError):
                if connection.fileno() < 0 or (select([connection], [], [], 0)[0] and not connection.recv(1, MSG_PEEK)):
                    handle.cancel()

    def submit(self, prompt=None, max_tokens=16, seed=None, stop=None, logit_bias=None, model=None, **sampling):
        if not isinstance(prompt, str):
            raise TypeError(f"prompt: expected a string, got {prompt!r}")
        biases = {int(token): bias for token, bias in dict(logit_bias or {}).items()}
        params, ids = SamplingParams(logit_bias=biases, **sampling), self.tokenizer(prompt)["input_ids"]
        return self.session.submit(Request(ids, max_tokens, params, seed, stop_strings=stop, tokenizer=self.tokenizer))

    def answers(self, handle, stream):
        """The text, in pieces if it is streamed. A character is held back until it is complete or the text ends."""
        body, tokens, sent = {"id": f"cmpl-{handle.index}", "object": "text_completion"}, [], 0
        for token in handle.tokens() if stream else ():
            tokens.append(token)
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            if not text.endswith("\ufffd"):
                yield body | {"choices": [{"index": 0, "text": text[sent:], "finish_reason": None}]}
                sent = len(text)
        done = handle.result()
        if done.error is not None:
            raise (ValueError if done.seed is None else RuntimeError)(done.error)
        text = self.tokenizer.decode(done.new_tokens, skip_special_tokens=True)
        reason = "stop" if done.finish_reason == "eos" else done.finish_reason
        num_all, num_new = len(done.tokens), len(done.new_tokens)
        usage = {"prompt_tokens": num_all - num_new, "completion_tokens": num_new, "total_tokens": num_all}
        yield body | {"choices": [{"index": 0, "text": text[sent:], "finish_reason": reason}], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        if self.path != "/v1/completions":
            return self.send_error(404)
        status, stream, answers = 200, False, iter(())
        try:
            fields = dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            stream = fields.pop("stream", False)
            handle = self.server.submit(**fields)
            self.server.connections[handle] = self.connection
            answers = self.server.answers(handle, stream)
            # Before the headers, because a request that is refused has no first token.
            first = next(answers)
        except (RuntimeError, TypeError, ValueError) as error:
            status, stream = 500 if isinstance(error, RuntimeError) else 400, False
            first = {"error": {"message": str(error)}}
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.end_headers()
            for answer in chain([first], answers):
                line = json.dumps(answer).encode()
                self.wfile.write(b"data: %s\n\n" % line if stream else line)
            if stream:
                self.wfile.write(b"data: [DONE]\n\n")


def main():
    folder = files("torch_specops") / "data" / "austen_bytes"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=folder / "target")
    parser.add_argument("--draft", default=folder / "draft")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1024)
    args = parser.parse_args()
    target, draft = (AutoModelForCausalLM.from_pretrained(each) for each in (args.target, args.draft))
    session = SpeculativeDecoder(target, draft, num_draft_tokens=4).session(args.batch_size, max_length=args.max_length)
    with session, Server(args.port, session, AutoTokenizer.from_pretrained(args.target)) as server:
        print(f"http://127.0.0.1:{server.server_port}/v1/completions", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
