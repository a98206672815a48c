"""A memory timeline of one training step: bytes held at the ends of each decoder layer, forward and backward.

Forward hooks of the layers mark the forward. In backward a layer begins when the gradient of its output is there, and
ends when that of its input is, which is the output of the layer before: hooks of these tensors mark both. What a
checkpointed layer recomputes lies between. A layer's own hooks are called again by the recomputation, or not, depending
on the version of transformers, and are ignored there.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import fastft

from .meters import Held, Meter, meter_for
from .subject import decoder_layers

# Two for kernels to compile and lazy memory to be made; checkpointing="auto" plans by them, at the start of the third.
WARM_UP = 3
# What fastft counts about where activations waited.
COUNTERS = ("input ", "layer ", "left alone", "not planned", "out of memory")
Point = Literal["start", "forward begins", "forward ends", "loss", "backward begins", "backward ends", "end"]
Option = Literal["off", "recompute", "selective", "offload", "auto"]


@dataclass(frozen=True, slots=True)
class Way:
    """How activations are treated.

    Attributes:
        option: fastft's `checkpointing`, with gradient checkpointing switched on; "off" leaves it switched off.
        budget: fastft's `memory_budget`.
    """

    option: Option
    budget: int | Literal["auto"] | None = None

    @property
    def name(self) -> str:
        if self.option == "off":
            return "no checkpointing"
        budget = f"{self.budget / 1e9:.2f} GB" if isinstance(self.budget, int) else self.budget
        return f'checkpointing="{self.option}"' + (f", budget {budget}" if budget else "")


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of a step.

    Attributes:
        point: what begins or has ended.
        layer: the decoder layer it is of, or None.
        milliseconds: since the start of the step.
        held: bytes.
        peak: the most bytes since the sample before.
    """

    point: Point
    layer: int | None
    milliseconds: float
    held: int
    peak: int


@dataclass
class Timeline:
    """One step of one way.

    Attributes:
        way: its name.
        layers: of the model.
        samples: in order; up to where the memory ended, if it did.
        failure: why there are no more, or "".
        notes: what fastft says about where layer inputs waited, with counts.
        loss: of the step.
        sent: bytes sent to the host.
    """

    way: str
    layers: int
    samples: list[Sample] = field(default_factory=list)
    failure: str = ""
    notes: list[str] = field(default_factory=list)
    loss: float | None = None
    sent: int = 0

    @property
    def peak(self) -> int | None:
        return max((sample.peak for sample in self.samples), default=None)

    @property
    def peak_at(self) -> tuple[Sample, Sample] | None:
        """The two samples that the highest peak lies between."""
        if not self.samples:
            return None
        number = max(range(len(self.samples)), key=lambda place: self.samples[place].peak)
        return self.samples[max(number - 1, 0)], self.samples[number]

    def find(self, point: Point, layer: int | None = None) -> Sample | None:
        return next((each for each in self.samples if (each.point, each.layer) == (point, layer)), None)


class Recorder:
    """Takes the samples of one step.

    Args:
        meter: what it reads.
        layers: the decoder layers, first to last.
    """

    def __init__(self, meter: Meter, layers: list[torch.nn.Module]) -> None:
        self.meter = meter
        self.layers = layers
        self._in_forward = True
        self._raw: list[tuple[Point, int | None, Any, Held]] = []

    def take(self, point: Point, layer: int | None = None) -> None:
        """A sample of this moment."""
        self._raw.append((point, layer, self.meter.mark(), self.meter.read()))
        self._in_forward = self._in_forward and point != "loss"

    def has(self, point: Point, layer: int) -> bool:
        return any((point, layer) == raw[:2] for raw in self._raw)

    def samples(self) -> list[Sample]:
        """All that were taken; waits for the device."""
        return [
            Sample(point, layer, self.meter.milliseconds(self._raw[0][2], mark), *held)
            for point, layer, mark, held in self._raw
        ]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on the layers, and through them on the tensors between."""
        with contextlib.ExitStack() as handles:
            for number, layer in enumerate(self.layers):
                before = layer.register_forward_pre_hook(self._before(number), with_kwargs=True)
                after = layer.register_forward_hook(self._after(number))
                handles.callback(before.remove)
                handles.callback(after.remove)
            yield

    def _before(self, number: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._in_forward:
                return
            self.take("forward begins", number)
            hidden = args[0] if args else kwargs.get("hidden_states")
            if number == 0 and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda gradient: self.take("backward ends", 0))

        return hook

    def _after(self, number: int) -> Callable[[Any, tuple[Any, ...], Any], None]:
        def hook(layer: Any, args: tuple[Any, ...], output: Any) -> None:
            if not self._in_forward:
                return
            self.take("forward ends", number)
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda gradient: self._gradient_of_output(number))

        return hook

    def _gradient_of_output(self, number: int) -> None:
        if number + 1 < len(self.layers):
            self.take("backward ends", number + 1)
        self.take("backward begins", number)


def measure(model: Any, ways: list[Way], tokens: int, device: torch.device, seed: int = 0) -> list[Timeline]:
    """One step of each way, on one model and one row of random tokens, after steps of warm-up.

    A step is the forward with the model's own loss and backward; there is no optimizer.

    Args:
        model: in training mode on its device, with adapters or without.
        ways: what is told to fastft and the model before.
        tokens: of the row.
        device: of the model.
        seed: of the tokens.

    Raises:
        UnsupportedOptionError: fastft refuses an option of a way here.
        UnsupportedModelError: no decoder layers were found.
    """
    layers = decoder_layers(model)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (1, tokens), generator=generator).to(device)
    found = []
    for way in ways:
        prepare(model, way)
        found.append(_measure_one(model, way, ids, layers))
        model.zero_grad(set_to_none=True)
    fastft.unpatch_model(model)
    return found


def prepare(model: Any, way: Way) -> None:
    """Patches the model anew, in the order of a script and its trainer."""
    fastft.unpatch_model(model)  # with what an earlier way held, and counted
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    _switch(causal, "disable")
    causal.disable_input_require_grads()  # else each switching on adds a hook
    options: dict[str, Any] = {} if way.budget is None else {"memory_budget": way.budget}
    fastft.patch_model(model, checkpointing=False if way.option == "off" else way.option, **options)
    if way.option != "off":
        _switch(causal, "enable", {"use_reentrant": False})


def _switch(causal: Any, name: Literal["enable", "disable"], *args: Any) -> None:
    """Gradient checkpointing, which newer transformers call activation checkpointing."""
    method = getattr(causal, f"activation_checkpointing_{name}", None)
    (method or getattr(causal, f"gradient_checkpointing_{name}"))(*args)


def _measure_one(model: Any, way: Way, ids: torch.Tensor, layers: list[torch.nn.Module]) -> Timeline:
    timeline = Timeline(way.name, len(layers))
    recorder: Recorder | None = None
    _release(ids.device)
    try:
        for _ in range(WARM_UP):
            _step(model, ids, lambda point: None)
            model.zero_grad(set_to_none=True)
        _release(ids.device)
        before = dict(fastft.report(model).counters)
        with meter_for(ids.device, [*model.parameters(), *model.buffers(), ids]) as meter:
            recorder = Recorder(meter, layers)
            with recorder.watching():
                timeline.loss = _recorded_step(model, ids, recorder)
        timeline.notes, timeline.sent = _what_fastft_did(model, way, before)
    except torch.OutOfMemoryError:
        timeline.failure = "out of memory"
    timeline.samples = recorder.samples() if recorder is not None else []
    return timeline


def _recorded_step(model: Any, ids: torch.Tensor, recorder: Recorder) -> float:
    recorder.take("start")
    loss = _step(model, ids, recorder.take)
    if not recorder.has("backward ends", 0):  # frozen embeddings: no gradient leaves the first layer
        recorder.take("backward ends", 0)
    recorder.take("end")
    return loss.item()


def _step(model: Any, ids: torch.Tensor, take: Callable[[Point], None]) -> torch.Tensor:
    gpu = ids.device.type == "cuda"
    with torch.autocast("cuda", torch.bfloat16) if gpu else contextlib.nullcontext():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    take("loss")
    loss.backward()
    return loss.detach()


def _what_fastft_did(model: Any, way: Way, before: dict[str, int]) -> tuple[list[str], int]:
    """In the step since `before`: where layer inputs waited, if not as they were asked to, and bytes sent."""
    report = fastft.report(model)
    counted = {name: count - before.get(name, 0) for name, count in report.counters.items()}
    sent = counted.pop("bytes offloaded", 0)
    if way.option in ("off", "recompute"):  # they do as they are told
        return [], sent
    notes = [f"{name} ({count} x)" for name, count in sorted(counted.items()) if count and name.startswith(COUNTERS)]
    notes += [left.reason for left in report.skipped if left.op == "checkpointing"]
    if report.memory is not None:
        notes.append(report.memory.reason)
    return notes, sent


def _release(device: torch.device) -> None:
    """As if the process were fresh: the planner, too, looks at the peak of the allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
