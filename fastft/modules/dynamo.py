"""What torch.compile of torch 2.11 gets wrong about patched models, and 2.13 does not."""

from __future__ import annotations

import torch
import torch._dynamo.utils

_OLD = torch.__version__ < "2.13"


def treat_as_constants(cls: type[str]) -> None:
    """Lets values of a subclass of str be traced: 2.11 takes them for objects that are in no dict."""
    if _OLD:
        torch._dynamo.utils.common_constant_types.add(cls)


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`. Dynamo of 2.11 takes that call for True in plain torch.compile as well; what the
    function returns, it reads right."""
    return torch.compiler._is_exporting_flag if _OLD else torch.compiler.is_exporting()
