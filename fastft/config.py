"""What a user may choose: one field an op."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .errors import UnsupportedOptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchConfig:
    """The options of `patch_model`.

    Every field takes "auto" (the best implementation that can run, the stock one otherwise, and the report says
    why), the name of one implementation (used, or an error says why it cannot be), or False (left alone).

    Attributes:
        attention: "fa2" (PyTorch's own varlen FlashAttention-2), "sdpa" (one call per document), "reference".
        packing: "auto" recognises batches that hold several sequences in a row and keeps them apart; False hands
            every batch to the stock implementation.
        unpad: "auto" drops the padding of padded batches in training, where the model's own loss uses no output there;
            False keeps it. Logits, hidden states and router logits are zero at dropped places, so give False if you
            add a loss of your own over them that does not mask the padding. True is a promise that you use none of them
            at padding: padding is then dropped without the model's own loss too (trainers that keep the labels to
            themselves, a teacher or reference model that is told use_cache=False; not generation without a cache from
            rows that are padded at their end).
        rope: "triton", "reference".
        rope_in_place: True rotates q and k where they lie whenever that is provably safe, "auto" only in batches so
            long that the memory counts, False never. The results are the same. Under True the report counts refusals
            with their reasons.
        rms_norm: "triton", "reference".
        add_rms_norm: "auto" adds a residual in the pass of the norm behind it, in decoder layers whose forward is the
            usual one, by the implementation of rms_norm. Such a layer gets a subclass of its class, of the same name.
        gated_mlp: "triton", "reference". The product of the activated gate and the other half is made in one pass, and
            not kept for backward where the projection behind it is a plain linear layer or has a fused adapter.
        residual_stream: what embeddings and norms with fp32 weights give under autocast of 16 bits, as after PEFT's
            prepare_model_for_kbit_training. "auto" leaves it in fp32, which doubles what layers read, write and keep,
            and the report counts it; "autocast" gives autocast's dtype. `inputs_embeds` stay what they are.
        experts: who multiplies in the experts of sparse layers: "grouped_mm" (PyTorch's), "triton", "loop",
            "reference". What is between the products is fused wherever Triton runs. Routers stay the model's own.
        lora: "fused" computes a LoRA projection without extra passes over its output, where PEFT's own forward would
            compute exactly that. Under "auto" every other adapter stays PEFT's. Asked for by name, an adapter whose
            kind rules it out (DoRA and other variants, other LoRA layers such as those over 8 bits, lora_bias,
            fan_in_fan_out, dropout in training) raises at the first call; what may pass (disabled, merged or several
            adapters, hooks, dtypes, devices, torch.compile) still goes to PEFT's forward, and the report counts it.
            Over weights of 4 bits an output has the dtype computed in, as over plain ones, where bitsandbytes casts it
            back to that of an fp32 input.
        loss: "triton", "chunked", "reference": who goes over the logits where one of TRL's trainers asks for the
            log-probabilities of tokens and the head is frozen. Each logit is made once, where TRL's own head makes it
            again in backward; logits of 2,048 tokens are held, or a 64th of the card's memory. A target beyond the
            vocabulary is an error on a CPU and NaN on a GPU. What is not served is counted with its reason.
        checkpointing: what becomes of layers for which gradient checkpointing is switched on, by a trainer or by hand.
            Nothing is checkpointed that the caller did not ask to be, and the gradients are the same. "auto" measures
            two steps and plans the fastest that takes at most the memory of plain checkpointing; with several processes
            it plans nothing, since plans could differ where layers communicate. Under torch.compile every layer is
            checkpointed as stock has it, whatever is asked for. "selective" keeps products of matrices
            and attention and runs only norms and activations again: about half of a layer's memory (Qwen3-8B with LoRA,
            16,384 tokens: 1,352 of 2,536 MiB). Where a layer's MLP stays stock, torch's selective checkpointing does
            it, with one backward for each forward. "offload" runs the whole layer again, from an input that waits in
            host memory, which frees layers x tokens x hidden x bytes of the GPU, less the last layer's input and a
            first one that autograd holds itself (a leaf, as where embeddings are frozen). "recompute" keeps the inputs
            on the GPU, as stock does; False leaves Hugging Face's function alone.
        walks: "auto" answers what trainers ask of a whole model in each step (`train()` where nothing is to change,
            `parameters()`, `num_parameters()`) in a tenth to a third of nn.Module's time; False leaves that to it.
        memory_budget: bytes of GPU memory at the highest, or "auto" for what is free, within which "auto" plans
            instead, keeping as much as fits. Given, layers are planned whether checkpointing is switched on or not.
    """

    attention: str | Literal[False] = "auto"
    packing: str | Literal[False] = "auto"
    unpad: str | bool = "auto"
    rope: str | Literal[False] = "auto"
    rope_in_place: str | bool = "auto"
    rms_norm: str | Literal[False] = "auto"
    add_rms_norm: str | Literal[False] = "auto"
    gated_mlp: str | Literal[False] = "auto"
    residual_stream: Literal["auto", "autocast"] = "auto"
    experts: str | Literal[False] = "auto"
    lora: str | Literal[False] = "auto"
    loss: str | Literal[False] = "auto"
    checkpointing: str | Literal[False] = "auto"
    walks: Literal["auto", False] = "auto"
    memory_budget: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("rope_in_place", "unpad"):
                if not isinstance(value, bool) and value != "auto":  # 1 == True, but is no option
                    raise UnsupportedOptionError(f"{field.name}={value!r} is no option; give 'auto', True or False")
            elif field.name == "memory_budget":
                self._check_budget()
            elif value is not False and not isinstance(value, str):
                raise UnsupportedOptionError(
                    f"{field.name}={value!r} is not an option; give 'auto', the name of an implementation, or False"
                )
        for name in ("add_rms_norm", "packing", "walks"):
            value = getattr(self, name)
            if value not in ("auto", False):
                raise UnsupportedOptionError(f"{name}={value!r} is not an option; give 'auto' or False")
        if self.residual_stream not in ("auto", "autocast"):
            raise UnsupportedOptionError(
                f"residual_stream={self.residual_stream!r} is not an option; give 'auto' or 'autocast'"
            )
        if self.checkpointing not in ("auto", "selective", "offload", "recompute", False):
            raise UnsupportedOptionError(
                f"checkpointing={self.checkpointing!r} is not an option; give 'auto', 'selective', 'offload', "
                "'recompute' or False"
            )
        if self.packing is False and self.unpad is True:
            raise UnsupportedOptionError(
                "unpad=True makes packed rows of padded batches, which packing=False turns off; leave one of them out"
            )
        if self.packing and self.attention is False:
            raise UnsupportedOptionError(
                "packing needs fastft's attention, which attention=False turns off; give packing=False as well"
            )
        if self.rope_in_place is True and self.rope is False:
            raise UnsupportedOptionError(
                "rope_in_place=True needs fastft's rope, which rope=False turns off; leave one of them out"
            )

    def _check_budget(self) -> None:
        budget = self.memory_budget
        if budget in (None, "auto"):
            valid = True
        else:
            valid = isinstance(budget, int) and not isinstance(budget, bool) and budget > 0
        if not valid:
            raise UnsupportedOptionError(
                f"memory_budget={budget!r} is no option; give bytes as a positive int, 'auto' or None"
            )
        if budget is not None and self.checkpointing != "auto":
            raise UnsupportedOptionError(
                f"memory_budget needs checkpointing='auto', which plans by it; checkpointing={self.checkpointing!r} "
                "leaves nothing to plan"
            )

    def with_options(self, options: dict[str, Any]) -> PatchConfig:
        """This config with some fields replaced.

        Raises:
            UnsupportedOptionError: a name that is no field.
        """
        known = {field.name for field in fields(self)}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise UnsupportedOptionError(f"unknown option {unknown[0]!r}; fastft knows {', '.join(sorted(known))}")
        return replace(self, **options)
