"""From the target's logits to a distribution: parameters of each row, processors, and log-probabilities."""

from .parameters import ALWAYS, NEUTRAL, Bias, SamplingParams, SamplingTensors
from .processors import Processors

__all__ = ["ALWAYS", "NEUTRAL", "Bias", "Processors", "SamplingParams", "SamplingTensors"]
