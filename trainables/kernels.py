"""Timing operators of the model one by one, on one device, as a training runs them."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

from search_spaces.engines.megatron import Megatron
from search_spaces.models import ModelShape
from search_spaces.operators import Kind, Operator, OperatorTiming
from trainables.child import error_line, is_out_of_memory
from trainables.engines.base import BETAS, GRADIENT_CLIP, WEIGHT_DECAY
from trainables.engines.megatron.context import GatheredAttention, positions
from trainables.engines.megatron.fp8 import use_fp8
from trainables.forks import Fork, halted
from trainables.gauge import Gauge
from trainables.model import (
    INIT_STD,
    Attention,
    Parts,
    causal_attention,
    compiled_loss,
    language_model_loss,
    make_norm,
    rotary_table,
)
from trainables.moe import ONE_PROCESS, MoE, swiglu
from trainables.platforms.base import AHEAD_S, Platform
from trainables.profiling import busy_s
from trainables.program import Place
from trainables.standin.join import join

ROUNDS = 5
"""Times that each pass is measured, for the median."""

LONG_S, ROUNDS_OF_LONG = 10e-3, 3
"""Times that a pass is measured which takes as long as that: one round of it differs less from another."""

ROUND_S, MOST = 4e-3, 10
"""Seconds that the passes of one round take together, and the most of them: what a device is given to do while it waits
to begin must be handed over in time."""

TRIES = 3
"""Rounds that are begun, at most, for each that counts."""

HELD_S = 10e-3
"""Seconds in which the host must have handed a round over, or else the profiler tells what the device takes."""

CHUNK = 2**26
"""Parameters of a tensor of those that are updated."""


COMPUTING = (Kind.PRODUCT, Kind.ATTENTION, Kind.EXPERTS)
"""What takes longer where the clock is lower, and is measured with zeros; all else is bound by memory.

What a product draws depends on its values. With random ones it exceeds a power limit within a millisecond, and the
clock falls, in which the cost model has it fall itself; with zeros it stays beneath (He 2024, "Strangely, Matrix
Multiplications on GPUs Run Faster When Given 'Predictable' Data!"). On H100 products took 0.87 to 0.94 of the time.
"""


class Unmeasured(Exception):
    """The operator is none that is measured; the text says why."""


class Device(NamedTuple):
    """What kernels are timed on: its UUID, None on CPU, and names and versions as a report has them."""

    identity: str | None
    environment: dict[str, str]


class Finding(NamedTuple):
    """What a kernel takes, or why that is not known; whether that is as memory ran out."""

    found: OperatorTiming | str
    out_of_memory: bool = False


def serve(
    messages: Connection, operators: Sequence[Operator], until: float, place: Place, beside: Sequence[Fork]
) -> None:
    """The life of a process that times operators in their order, those that begin before `until` of the monotonic
    clock, and halts others for that. It says a `Device`, a `Finding` for each operator, and None in the end."""
    warnings.filterwarnings("ignore", module="torch")
    platform, device = place.platform, place.platform.take(place.local_rank)
    # Experts of DeepSpeed want to know their group.
    join(0, 1, lambda *call: 0.0, device)
    # A backward pass is repeated, and so must leave what it is given as it is.
    torch._functorch.config.donated_buffer = False
    environment = {"torch": str(torch.__version__)} | platform.versions(device)
    messages.send(Device(platform.identity(device), environment))
    # A processor works for no process that is halted.
    gauge = Gauge(platform, device) if device.type != "cpu" else None
    for operator in operators:
        if time.monotonic() > until:
            break
        try:
            finding = Finding(_timing(operator, device, platform, beside, gauge))
        except Unmeasured as reason:
            finding = Finding(f"{operator.label}: {reason}")
        except Exception as error:  # out of memory, or what a library makes of such a shape
            finding = Finding(f"{operator.label}: {error_line(error, 'measuring')}", is_out_of_memory(error))
        messages.send(finding)
    messages.send(None)


def _timing(
    operator: Operator,
    device: torch.device,
    platform: Platform,
    beside: Sequence[Fork] = (),
    gauge: Gauge | None = None,
) -> OperatorTiming:
    """Of one operator, `beside` halted while it is timed, once the device is done with what they gave it, by a `gauge`.
    Raises `Unmeasured`, and whatever torch does."""
    passes = _passes(operator, device)
    for task in passes:
        task()  # what is compiled is compiled now
    platform.synchronize()
    with halted(beside):
        if gauge is not None:
            gauge.wait()
        forward_s, *backward_s = [_seconds(task, platform) for task in passes]
    release = Version(torch.__version__).base_version
    return OperatorTiming(operator, forward_s, backward_s[0] if backward_s else None, release)


def _passes(operator: Operator, device: torch.device) -> list[Callable[[], object]]:
    """The operator forward and, where that is a pass of its own, backward."""
    if operator.kind == Kind.UPDATE:
        return [_update(operator, device)]
    if operator.precision == "fp8" and operator.compiled:
        raise Unmeasured("the compiler makes casts to fp8 part of others' kernels")
    if operator.kind not in _MADE or {"shared", "autocast"} & set(operator.form):
        raise Unmeasured("only a training on several GPUs has it")
    torch.compiler.reset()  # each shape is compiled for itself, as in a training
    with device:
        forward, inputs = _MADE[operator.kind](operator)
    outputs = _several(forward())
    alike = torch.zeros_like if operator.kind in COMPUTING else torch.randn_like
    gradients = [alike(output) for output in outputs]

    def backward() -> None:
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return [forward, backward]


def _several(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _seconds(task: Callable[[], object], platform: Platform) -> float:
    """What the device takes for a task that it has done before, the median of some rounds.

    Where the host cannot be ahead of it, because the task waits for the device or has too much to hand over, the time
    in which the device has something to do. A round that the host was late for, as others had it, is none.
    """
    (once,) = platform.race(task, task)
    count = max(1, min(MOST, math.ceil(ROUND_S / once)))
    rounds = ROUNDS if once < LONG_S else ROUNDS_OF_LONG
    over = 0.0

    def several() -> None:
        nonlocal over
        for _ in range(count):
            task()
        over = time.perf_counter()

    handed_s = platform.handed_s(several, HELD_S)
    ahead_s = max(AHEAD_S, 2 * handed_s)  # the first task is handed over as well
    taken = list[float]()
    for _ in range(0 if handed_s > HELD_S else TRIES * rounds):
        began = time.perf_counter()
        (seconds,) = platform.race(task, several, ahead_s=ahead_s)
        if handed_s == 0.0 or over - began < ahead_s:  # 0 on a device that is the host
            taken.append(seconds)
        if len(taken) == rounds:
            return statistics.median(taken) / count
    return statistics.median(busy_s(several, platform) for _ in range(rounds)) / count


T = TypeVar("T")
Made = tuple[Callable[[], Tensor | tuple[Tensor, ...]], list[Tensor]]
"""What runs an operator forward, and the tensors of which a backward pass makes gradients."""


def _dtype(operator: Operator) -> torch.dtype:
    return torch.float32 if operator.precision == "fp32" else torch.bfloat16


def _hidden(operator: Operator, *size: int) -> Tensor:
    """Such as come from the part before."""
    return torch.randn(*size, dtype=_dtype(operator), requires_grad=True)


def _zeros(tensors: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [tensor.zero_() for tensor in tensors]


def _compiled(operator: Operator, function: Callable[..., T]) -> Callable[..., T]:
    return torch.compile(function) if operator.compiled else function


def _shape(**dimensions: int | str) -> ModelShape:
    """A model with some dimensions, those that nobody asks for being 1."""
    plain = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "max_sequence_length"), 1)
    return ModelShape(**({"family": "llama"} | plain | dimensions))  # type: ignore[arg-type]


def _product(operator: Operator) -> Made:
    rows, inside, outside = operator.dims
    linear = nn.Sequential(nn.Linear(inside, outside, bias="bias" in operator.form, dtype=_dtype(operator)))
    if operator.precision == "fp8":
        use_fp8(linear)
    inputs = _zeros([_hidden(operator, rows, inside), *linear.parameters()])
    return lambda: linear(inputs[0]), inputs


class _Gathered(GatheredAttention):
    """That of the second of `size` ranks, which merges most, and to which the others' keys and values, its own, come
    without a copy, nor their gradients back."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 1

    def _gather(self, local: Tensor) -> Tensor:
        gathered: Tensor = _AllAlike.apply(local, self.size)  # type: ignore[no-untyped-call]
        return gathered


class _AllAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, size: int) -> Tensor:
        return local.expand(size, *local.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][0], None


def _attention(operator: Operator) -> Made:
    sequences, queries, heads, keys, width, times = operator.dims
    if heads % width or keys % width or heads % keys:
        raise Unmeasured("heads are split")
    shape = _shape(hidden=heads, heads=heads // width, kv_heads=keys // width)
    rotary = None
    if "rotary" in operator.form:
        where = positions(queries * times, times, 1 % times, torch.get_default_device())
        rotary = rotary_table(width, where, 10_000.0)
    with torch.device("meta"):  # nothing is made of the products
        attention = Attention(shape, rotary)
    attention.attend = _Gathered(times) if times > 1 else causal_attention
    run = _compiled(operator, attention.mixed)
    projected = _zeros([_hidden(operator, sequences, queries, size) for size in (heads, keys, keys)])
    return lambda: run(*projected), projected


def _norm(operator: Operator) -> Made:
    rows, width = operator.dims
    norm = make_norm(_shape(family=operator.form[0], hidden=width)).to(_dtype(operator))

    def summed(x: Tensor, more: Tensor) -> tuple[Tensor, ...]:
        whole = x + more
        return whole, norm(whole)

    run = _compiled(operator, summed)
    both = [_hidden(operator, rows, width) for _ in range(2)]
    return lambda: run(*both), [*both, *norm.parameters()]


def _activation(operator: Operator) -> Made:
    rows, width = operator.dims
    if "gpt" in operator.form:
        run = _compiled(operator, lambda x: F.gelu(x, approximate="tanh"))
        inputs = [_hidden(operator, rows, width)]
    else:
        run = _compiled(operator, swiglu)
        inputs = [_hidden(operator, rows, width) for _ in range(2)]
    return lambda: run(*inputs), list[Tensor](inputs)


def _experts(operator: Operator) -> Made:
    tokens, hidden, inner, here, chosen = operator.dims
    if here < chosen:
        raise Unmeasured("a GPU has fewer experts than a token")
    shape = _shape(hidden=hidden, ffn_hidden=inner, num_experts=here, experts_per_token=chosen)
    if "filled" in operator.form:
        import deepspeed

        from trainables.engines.deepspeed.engine import DispatchedExperts

        deepspeed.init_distributed(dist_init_required=False)
        where = torch.arange(tokens, device=torch.get_default_device())
        mixture: nn.Module = DispatchedExperts(Parts(shape, where, seed=0), 0, 1, 0, None, shape.router_aux_loss)
        mixture.moe.set_deepspeed_parallelism()  # type: ignore[union-attr, operator]
    else:
        mixture = MoE(shape, ONE_PROCESS)
        nn.init.normal_(mixture.router.weight, std=INIT_STD)
    mixture.to(_dtype(operator))
    _zeros([weight for weight in mixture.parameters() if weight is not mixture.router.weight])  # type: ignore[union-attr]
    run = _compiled(operator, mixture)
    x = _hidden(operator, 1, tokens, hidden)
    return lambda: run(x), [x, *mixture.parameters()]


def _embedding(operator: Operator) -> Made:
    tokens, width, entries = operator.dims
    table, numbers = _hidden(operator, entries, width), torch.randint(entries, (tokens,))
    return lambda: F.embedding(numbers, table), [table]


def _loss(operator: Operator) -> Made:
    tokens, entries = operator.dims
    logits, labels = _hidden(operator, tokens, entries), torch.randint(entries, (tokens,))
    run = compiled_loss() if operator.compiled else language_model_loss
    return lambda: run(logits, labels), [logits]


def _update(operator: Operator, device: torch.device) -> Callable[[], object]:
    """Clipping by the norm of all gradients, and the update, of an engine that leaves both to torch."""
    if operator.form != (Megatron.name,):
        raise Unmeasured("the engine has an optimizer of its own")
    (count,) = operator.dims
    sizes = [CHUNK] * (count // CHUNK) + [count % CHUNK] * (count % CHUNK > 0)
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def update() -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, GRADIENT_CLIP, norm)
        optimizer.step()

    return update


_MADE: dict[Kind, Callable[[Operator], Made]] = {
    Kind.PRODUCT: _product,
    Kind.ATTENTION: _attention,
    Kind.NORM: _norm,
    Kind.ACTIVATION: _activation,
    Kind.EXPERTS: _experts,
    Kind.EMBEDDING: _embedding,
    Kind.LOSS: _loss,
}
