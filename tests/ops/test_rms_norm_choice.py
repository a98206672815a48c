"""Which implementation of RMSNorm runs, and what a caller is told when none can."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rms_norm_cases import EPS, make

from fastft.capability import DeviceFacts, SoftwareFacts, assess
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.rms_norm import api, reference, rms_norm, verdicts

SOFTWARE = SoftwareFacts(torch_version="2.13", triton_version="3.9")


def gpu(arch):
    return assess(DeviceFacts("cuda", arch=arch, sm_count=100), SOFTWARE)


@pytest.mark.parametrize(
    ("capability", "dtype", "options", "expected"),
    [
        (gpu((9, 0)), torch.bfloat16, {"hidden_size": 4096}, "triton"),
        (gpu((9, 0)), torch.float64, {"hidden_size": 4096}, "reference"),
        (gpu((9, 0)), torch.float32, {"hidden_size": 4096, "weight_dtype": torch.float64}, "reference"),
        (gpu((9, 0)), torch.bfloat16, {"hidden_size": api.TRITON_MAX_HIDDEN_SIZE}, "triton"),
        (gpu((9, 0)), torch.bfloat16, {"hidden_size": api.TRITON_MAX_HIDDEN_SIZE + 1}, "reference"),
        (gpu((7, 5)), torch.float16, {"hidden_size": 4096}, "triton"),
        (gpu((7, 5)), torch.bfloat16, {"hidden_size": 4096}, "reference"),
        (gpu((7, 5)), torch.float16, {"hidden_size": 4096, "weight_dtype": torch.bfloat16}, "reference"),
        (assess(DeviceFacts("cpu"), SOFTWARE), torch.float32, {"hidden_size": 64}, "reference"),
    ],
)
def test_auto_takes_the_first_that_can_run(capability, dtype, options, expected):
    found = verdicts(capability, dtype, **options)
    assert next(name for name, verdict in found.items() if verdict) == expected
    assert all(verdict.reason for verdict in found.values())


def test_auto_on_the_cpu_is_the_reference():
    x, weight, _ = make((3, 64), "fp32")
    assert torch.equal(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS, "llama"))
    assert rms_norm(x.requires_grad_(), weight, EPS).grad_fn.name() != "_RMSNormFunctionBackward"


X = torch.ones(3, 8)


@pytest.mark.parametrize(
    ("x", "weight", "options", "error", "message"),
    [
        (X, torch.ones(7), {}, KernelInputError, r"weight has shape \[7\].*needs \[8\]"),
        (X, torch.ones(1, 8), {}, KernelInputError, r"weight has shape \[1, 8\]"),
        (X, torch.ones(8, device="meta"), {}, KernelInputError, "x is on cpu, weight on meta"),
        (X.long(), torch.ones(8), {}, KernelInputError, "x has dtype torch.int64"),
        (X, torch.ones(8).int(), {}, KernelInputError, "weight has dtype torch.int32"),
        (torch.tensor(1.0), None, {}, KernelInputError, "no dimension"),
        (X, None, {"rounding": "t5"}, UnsupportedOptionError, "unknown rounding 't5'.*llama, fp32_weight, gemma"),
        (X, None, {"impl": "cuda"}, UnsupportedOptionError, "unknown implementation 'cuda'"),
        (X.double(), None, {"impl": "triton"}, UnsupportedOptionError, "precision of fp64.*'reference'"),
        (torch.ones(1, 16385), None, {"impl": "triton"}, UnsupportedOptionError, "16385 does not fit.*'reference'"),
    ],
)
def test_errors_say_what_and_why(x, weight, options, error, message):
    with pytest.raises(error, match=message):
        rms_norm(x, weight, EPS, **options)


def test_meta_tensors_have_a_shape():
    y = rms_norm(torch.empty(3, 8, device="meta", dtype=torch.bfloat16), torch.empty(8, device="meta"), EPS)
    assert (y.shape, y.dtype, y.device.type) == ((3, 8), torch.float32, "meta")


def test_import_loads_no_triton():
    code = "import sys, fastft.ops.rms_norm; assert 'triton' not in sys.modules, 'triton was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
