"""Turns the target's logits into a distribution: sampling parameters, processors and log-probabilities."""

from .logprobs import raw_logprobs
from .parameters import ALWAYS, NEUTRAL, Bias, SamplingParams, SamplingTensors
from .processors import Processors

__all__ = ["ALWAYS", "NEUTRAL", "Bias", "Processors", "SamplingParams", "SamplingTensors", "raw_logprobs"]
