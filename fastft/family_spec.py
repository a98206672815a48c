"""What fastft needs to know of a model family. The families themselves are data, one small file each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """Which class of a family is what. Classes are named, and found by module and name, never by inheritance.

    Attributes:
        name: the family, as reports call it.
        module: the transformers module that holds the classes.
        backbone: the class that turns tokens into hidden states, and takes `packed_sequences` in its kwargs.
        decoder_layer: the class in which the sum after attention may be fused with the norm that follows, or None.
        attention: the class with q_proj, k_proj, v_proj, o_proj, head_dim and scaling.
        mlp: the class computing down_proj(act_fn(gate_proj(x)) * up_proj(x)), of dense layers and shared experts alike;
            None if every layer is sparse. Experts need no mention: they are found by transformers' experts interface.
        rms_norm: the norm class, with `weight` and the attribute named by `rms_norm_eps`.
        rms_norm_eps: where a norm module keeps its epsilon.
        rms_norm_rounding: a rounding order of `fastft.ops.rms_norm`.
        rope_layout: a layout of `fastft.ops.rope`.
        qk_norm: attention modules carry q_norm and k_norm, applied per head before the rotation.
        sliding_window: where an attention module finds its window: "none", its own attribute, or its config. With
            "none", a backbone whose masks have a window all the same is not packed.
    """

    name: str
    module: str
    backbone: str
    decoder_layer: str | None = None
    attention: str
    mlp: str | None
    rms_norm: str
    rms_norm_eps: str = "variance_epsilon"
    rms_norm_rounding: Literal["llama", "fp32_weight", "gemma"] = "llama"
    rope_layout: Literal["half", "interleaved"] = "half"
    qk_norm: bool = False
    sliding_window: Literal["none", "module", "config"] = "none"
