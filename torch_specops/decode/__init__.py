"""The decoding loop: `generate`, and the reusable `SpeculativeDecoder` behind it.

From the outside in: `decoder.py` (calls and prompts), `batch.py` (rows and their tensors, step after step),
`compiled.py` (runs a step eagerly, compiled or captured), `step.py` (one step). `planning.py` asks the schedule, and
`session.py` shares a batch out to requests that arrive over time.
"""

from .decoder import SpeculativeDecoder, generate
from .output import GenerationOutput, GenerationStats, Step, TopLogprobs
from .requests import Completion, Handle, Request
from .session import Session
from .step import Verifier

__all__ = [
    "Completion",
    "GenerationOutput",
    "GenerationStats",
    "Handle",
    "Request",
    "Session",
    "SpeculativeDecoder",
    "Step",
    "TopLogprobs",
    "Verifier",
    "generate",
]
