"""Compiles calls of the ops with Inductor for a CUDA device (sm_90) where there is none; prints a JSON line for each.

    python tests/helpers/inductor_for_cuda.py [CASE ...]

Inductor writes its code, and Triton and `ptxas` compile every kernel of it, as on a GPU; nothing is run. Tensors are
fake, and what torch and Triton ask of the device is answered here. A process of its own, because it changes torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch._inductor.runtime.triton_helpers
import triton
from op_cases import empty_arguments
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget

import torch_specops
from torch_specops.ops import private
from torch_specops.ops.attention import attend
from torch_specops.sampling import Processors

BATCH, NUM_DRAFTS, VOCAB_SIZE = 8, 5, 50_257
PROPERTIES = SimpleNamespace(
    name="sm_90",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=2**37,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)


class Driver:
    """Of Triton: it knows the target, and loads a kernel without a device."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        )

    def launcher_cls(self, *_: Any) -> None:
        return None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def item(tensor: Tensor, key: Any) -> Tensor:
    """`tensor[key]` for slices, or for tensors and whole dimensions. torch's own makes the device current, which a
    build without CUDA cannot."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(each, Tensor) for each in keys):
        assert all(isinstance(each, Tensor) or each == slice(None) for each in keys)
        return torch.ops.aten.index.Tensor(tensor, [each if isinstance(each, Tensor) else None for each in keys])
    for dim, part in enumerate(keys):
        tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop)
    return tensor


def pretend() -> None:
    """Answer what is asked of a device while code for it is compiled."""
    triton.runtime.driver.set_active(Driver())
    cuda = {
        "_exchange_device": lambda _: 0,
        "_lazy_init": lambda: None,
        "_maybe_exchange_device": lambda _: 0,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    interface = {
        "current_device": lambda: 0,
        "exchange_device": lambda _: 0,
        "get_compute_capability": lambda device=None: 90,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_raw_stream": lambda _: 0,
        "is_available": lambda: True,
        "maybe_exchange_device": lambda _: 0,
    }
    for name, value in interface.items():
        setattr(CudaInterface, name, staticmethod(value))
    CudaInterface.Worker.get_device_properties = staticmethod(lambda device=None: PROPERTIES)
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)
    fake_tensor.init_gpu_context = lambda device=None: None
    torch._inductor.runtime.triton_helpers.set_driver_to_gpu = lambda: None
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.use_static_cuda_launcher = False
    torch.Tensor.__getitem__ = item
    # These make tensors on the device to trace the patterns they look for.
    torch._inductor.fx_passes.joint_graph.lazy_init = lambda *_, **__: None
    torch._inductor.fx_passes.joint_graph.constant_fold_uniform_value = lambda _: None
    torch._inductor.fx_passes.post_grad.lazy_init = lambda *_, **__: None


def given(
    op: str, options: str = "temperature", dtype: torch.dtype = torch.bfloat16
) -> Callable[[], dict[str, Tensor]]:
    """What makes the arguments of a call, except those that are None."""

    def make() -> dict[str, Tensor]:
        arguments = empty_arguments(op, options, BATCH, NUM_DRAFTS, VOCAB_SIZE, dtype=dtype)
        return {name: value for name, value in arguments.items() if value is not None}

    return make


drafts = given("verify_exact")


def one_hot() -> dict[str, Tensor]:
    """With uniforms as strided as those of the loop."""
    uniforms = torch.empty(BATCH, NUM_DRAFTS + 1, device="cuda")
    return given("verify_exact", "one-hot")() | {"accept_uniforms": uniforms.narrow(1, 0, NUM_DRAFTS)}


def large_batch() -> dict[str, Tensor]:
    """Which is summed in two launches."""
    arguments = empty_arguments("verify_exact", "temperature", 16 * BATCH, NUM_DRAFTS, VOCAB_SIZE)
    return {name: value for name, value in arguments.items() if value is not None}


def seeds() -> dict[str, Tensor]:
    return {name: torch.empty(BATCH, dtype=torch.int64, device="cuda") for name in ("seeds", "positions")}


def processors() -> dict[str, Tensor]:
    """All of them, and the logits of a step."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "logits": ((BATCH, NUM_DRAFTS + 1, VOCAB_SIZE), torch.bfloat16),
        "text": ((BATCH, 192), torch.int64),
        "lengths": ((BATCH, NUM_DRAFTS + 1), torch.int64),
        "prompt_lengths": ((BATCH,), torch.int64),
        **{f"{name}_penalty": ((BATCH,), torch.float32) for name in ("repetition", "presence", "frequency")},
        "no_repeat_ngram_size": ((BATCH,), torch.int64),
        "words": ((8, 3), torch.int64),
        "biases": ((8,), torch.float32),
        "pieces": ((8, 3), torch.int64),
    }
    return {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in shapes.items()}


def process(logits: Tensor, text: Tensor, lengths: Tensor, **tensors: Tensor) -> Tensor:
    return Processors(longest_ngram=4, **tensors)(logits, text, lengths)


def attention() -> dict[str, Tensor]:
    """Queries as a model has them, transposed."""
    cache = [torch.empty(BATCH, 8, 2048, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    queries = torch.empty(BATCH, NUM_DRAFTS + 1, 32, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    spans = torch.empty(BATCH, NUM_DRAFTS + 1, 2, dtype=torch.int64, device="cuda")
    return {"queries": queries, "keys": cache[0], "values": cache[1], "spans": spans}


def after_a_product(target_logits: Tensor, **rest: Any) -> Any:
    """With work of Inductor's own in front."""
    return torch_specops.verify_exact(target_logits * 0.5, **rest)


# By name: a function, its arguments, and whether the batch is dynamic.
CASES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Tensor]], bool]] = {
    "verify_exact": (partial(torch_specops.verify_exact, lenience=0.5, argmax_lenience=0.5), drafts, False),
    "product": (after_a_product, given("verify_exact", dtype=torch.float32), False),
    "dynamic batch": (torch_specops.verify_exact, large_batch, True),
    "one-hot": (partial(torch_specops.verify_exact, draft_logits=None), one_hot, False),
    "verify_block": (torch_specops.verify_block, drafts, False),
    "verify_sigmoid": (torch_specops.verify_sigmoid, drafts, False),
    "verify_gumbel": (torch_specops.verify_gumbel, given("verify_gumbel"), False),
    "sample": (torch_specops.sample, given("sample"), False),
    "filters": (torch_specops.sample, given("sample", "temperature, filters"), False),
    "processors": (process, processors, False),
    "attention": (partial(attend, scale=128**-0.5), attention, False),
    "uniforms": (partial(torch_specops.uniforms, n=NUM_DRAFTS, stream="accept"), seeds, False),
    "call": (after_a_product, given("verify_exact", dtype=torch.float32), True),
}
# Code with Python calls the ops; AOTInductor inlines them, as in all other cases.
WITH_PYTHON = {"attention", "call"}


def compile_case(name: str) -> dict[str, Any]:
    function, make, dynamic = CASES[name]
    written: list[str] = []
    codegen = GraphLowering.codegen

    def keep(self: GraphLowering) -> Any:
        result = codegen(self)
        written.append(getattr(result[0], "value", result[0]))
        return result

    class Call(nn.Module):
        def forward(self, given: dict[str, Tensor]) -> Any:
            return function(**given)

    mode = fake_tensor.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with (
        mock.patch.object(GraphLowering, "codegen", keep),
        mock.patch.object(triton_kernel_wrap.log, "warning") as not_analysed,
        mock.patch.object(private, "makes_python", return_value=name in WITH_PYTHON),
        mode,
        torch.no_grad(),
    ):
        arguments = make()
        batch = torch.export.Dim("batch", max=4096)
        shapes = {key: {0: batch} for key in arguments}
        exported = torch.export.export(
            Call(), (arguments,), dynamic_shapes=(shapes,) if dynamic else None, strict=False
        )
        compile_fx(exported.module(), list(arguments.values()))
    (code,) = written
    sizes = re.findall(r"empty_strided\w*\(\((.*?)\)", code)
    return {
        "case": name,
        "calls": len(re.findall(r"= torch\.ops\.specops\.", code)),
        "kernels": len(set(re.findall(r"async_compile\.triton\('(\w+)'", code))),
        "copies_of_logits": sum(str(VOCAB_SIZE) in size for size in sizes),
        # Otherwise Inductor takes every input for an output, and copies it.
        "knows_what_kernels_write": not not_analysed.called,
    }


if __name__ == "__main__":
    pretend()
    for case in sys.argv[1:] or CASES:
        print(json.dumps(compile_case(case)), flush=True)
