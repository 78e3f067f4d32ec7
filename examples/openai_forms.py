"""What clients of OpenAI's API send to examples/server.py, and what they get.

Run `python examples/server.py`, which imports this file.
"""

from itertools import accumulate
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from pydantic import AfterValidator, Field, conint, conlist, constr, create_model


def fields(optional, **required):
    """The fields of a JSON object. Optional fields may be null. Other fields and other types are refused."""
    kinds = {name: (kind | None, None) for name, kind in optional.items()}
    kinds |= {name: (kind, ...) for name, kind in required.items()}
    return create_model("Fields", __config__={"extra": "forbid", "strict": True}, **kinds)


def grammar_of(form):
    """llguidance's grammar for a response format; None allows any text."""
    if form.type == "text":
        return None
    schema = {"type": "object"} if form.type == "json_object" else (form.json_schema or {}).get("schema")
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    # It refuses the keywords that it does not know.
    if problem := LLMatcher.validate_grammar(grammar):
        raise ValueError(problem)
    return grammar


STRING, NOTHING = constr(min_length=1), conlist(Any, max_length=0)
SAMPLING = dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), float)
SAMPLING |= {"logit_bias": Annotated[dict[int, float], Field(max_length=300)]}
BODY = SAMPLING | {
    "model": str,
    "user": str,
    "max_tokens": conint(ge=1),
    "max_completion_tokens": conint(ge=1),
    "n": conint(ge=1, le=16),
    "seed": conint(ge=-(2**63), lt=2**63),
    "stop": STRING | conlist(STRING, max_length=4),
    "stream": bool,
    "stream_options": dict[Literal["include_usage"], bool],
}
PARTS = conlist(fields({}, type=Literal["text"], text=str), min_length=1)
CONTENT = str | Annotated[PARTS, AfterValidator(lambda parts: "\n".join(part.text for part in parts))]
# Clients send an answer back with these.
ANSWER = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "annotations"), NOTHING)
ASSISTANT = fields({"content": CONTENT, "name": str} | ANSWER, role=Literal["assistant"])
MESSAGE = ASSISTANT | fields({"name": str}, role=str, content=CONTENT)
SCHEMA = dict[Literal["name", "description", "schema", "strict"], Any]
FORMAT = fields({"json_schema": SCHEMA}, type=Literal["text", "json_object", "json_schema"])
CHAT = BODY | {
    "response_format": Annotated[FORMAT, AfterValidator(grammar_of)],
    "tools": NOTHING,
    "logprobs": bool,
    "top_logprobs": conint(ge=0, le=5),
}
CHAT = fields(CHAT, messages=conlist(MESSAGE, min_length=1))
COMPLETION = fields(BODY | {"logprobs": conint(ge=0, le=5)}, prompt=STRING)


def messages_of(given):
    """The messages as a chat template takes them."""
    return [{"content": ""} | each.model_dump(exclude=set(ANSWER), exclude_none=True) for each in given.messages]


def num_top_logprobs(given):
    """None = no logprobs."""
    if isinstance(given, COMPLETION):
        return given.logprobs
    if given.top_logprobs is not None and not given.logprobs:
        raise ValueError("top_logprobs: expected logprobs: true with it")
    return given.top_logprobs or 0 if given.logprobs else None


def logprobs_of(given, completion, count, text_of):
    """The logprobs of a completion's first tokens. `text_of` is the text of a token after so many others."""
    most, tokens, entries = num_top_logprobs(given), completion.new_tokens.tolist(), []
    for place in range(count):
        top = zip(*(each[place, :most].tolist() for each in completion.top_logprobs), strict=True)
        said = []
        for token, logprob in ((tokens[place], completion.logprobs[place].item()), *top):
            text = text_of(tokens[:place], token)
            # Part of a character is no text. JSON has no infinity.
            known = None if "\ufffd" in text else list(text.encode())
            said.append({"token": text, "logprob": max(logprob, -9999.0), "bytes": known})
        entries.append(said[0] | {"top_logprobs": said[1:]})
    if isinstance(given, CHAT):
        return {"content": entries}
    texts = [entry["token"] for entry in entries]
    return {
        "tokens": texts,
        "token_logprobs": [entry["logprob"] for entry in entries],
        # Of tokens with the same text, the most likely counts.
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"][::-1]} for entry in entries],
        "text_offset": [0, *accumulate(map(len, texts))][:-1],
    }
