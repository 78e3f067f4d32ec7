"""Runs the launcher of `specops::attend` under Triton's interpreter over the shared cases, on poisoned memory; prints a
JSON line of its errors. A script of its own because TRITON_INTERPRET must be set before a kernel is defined."""

import itertools
import json
from dataclasses import replace

import oracle
import torch
import triton_interpreter
from attention_cases import CASES

from torch_specops.ops.cuda import attention


def main() -> None:
    triton_interpreter.prepare()
    errors = {}
    for (index, case), several in itertools.product(enumerate(CASES), (False, True)):
        # Of several parts some are without a slot.
        attention.RESIDENT_PROGRAMS = 8 * (index + 1) if several else 1
        arguments = case.arguments()
        with oracle.poison_memory():
            output = attention.attend(*arguments)
        errors[f"{case}, several parts: {several}"] = case.error(output)
        if case.dtype == torch.float32:
            assert torch.equal(output, attention.attend(*arguments))
    # A wrong kernel would be seen: the first query of each row as if it saw one slot less.
    case = replace(case, window=8)
    *tensors, spans, scale = case.arguments()
    spans[:, 0, 0] += spans[:, 0, 0] < spans[:, 0, 1]
    errors["wrong"] = case.error(attention.attend(*tensors, spans, scale))
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
