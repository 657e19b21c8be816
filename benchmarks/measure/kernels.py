"""How fast kernels of causal attention and products in 8-bit floats are alone, on one GPU of NVIDIA's.

    python -m benchmarks.measure.kernels attention|context|products

Attention: cuDNN's and FlashAttention-2's as torch has them, TFLOP/s of the causal half, where a backward pass has two
and a half times the FLOPs of a forward one, by width of heads and tokens of a sequence. Context: the same of one rank
of several that share each sequence, in ms, with all that the `megatron` engine does between the gathers of keys and
values and those of their gradients: by FlashAttention-2, in parts by cuDNN, and the rank's share of cuDNN's whole
square; and the largest relative error of results and gradients, against attention in fp32. Products: of weights in bf16
and in fp8, with the sums of fp8 in fewer bits ("fast") or not; in bursts, and for seconds at the power limit where they
are large. Each is the median of seven bursts with pauses between.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from service.answers.tables import render
from trainables.engines.megatron.context import attend_to_the_ends, positions
from trainables.merged import merged_parts

TOKENS, WIDTH = 16_384, 2048
"""Of a call of attention, but for longer sequences; and of all its heads together."""

LENGTHS, HEADS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536), (128, 64)

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}

CONTEXTS = (
    ("8B", 32, 8, 128, 8192, 2),
    ("70B, tp4", 16, 2, 128, 8192, 2),
    ("405B, tp8", 16, 1, 128, 8192, 2),
    ("1B", 32, 8, 64, 8192, 2),
    ("8B", 32, 8, 128, 65_536, 8),
)
"""Models of Llama 3: a GPU's heads of queries and of keys, their width, tokens of a sequence, ranks that share it."""

MOST_SCORES = 2**31
"""Of attention in fp32 that keeps them."""

SHAPES = (
    (8192, 4096, 1024),
    (8192, 4096, 4096),
    (8192, 4096, 14_336),
    (8192, 14_336, 4096),
    (8192, 2048, 7168),
    (16_384, 2048, 8192),
    (8192, 8192, 8192),
    (4096, 8192, 28_672),
)
"""Rows, width in, width out."""

BURSTS, BURST_S, PAUSE_S, LONG_S = 7, 4e-3, 0.03, 2.0


def burst_s(run: Callable[[], object], count: int) -> float:
    """Seconds of one of `count` calls, that the CPU has launched before they begin."""
    run()
    taken = []
    for _ in range(BURSTS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        taken.append(1e-3 * begin.elapsed_time(end) / count)
        time.sleep(PAUSE_S)
    return statistics.median(taken)


def long_s(run: Callable[[], object], once_s: float) -> float:
    """Seconds of one of so many calls that clocks have fallen to what the power limit allows."""
    for seconds in (LONG_S / 2, LONG_S):
        begin = time.perf_counter()
        for _ in range(count := max(1, int(seconds / once_s))):
            run()
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def attention() -> Iterator[list[str]]:
    """A row for each width of heads and length."""
    for width in HEADS:
        for length in LENGTHS:
            sequences = max(1, TOKENS // length)
            shape = sequences, length, WIDTH // width, width
            work = 2.0 * sequences * length * length * WIDTH
            count, row = max(1, int(BURST_S * 3e14 / work)), [str(width), str(length)]
            for backend in BACKENDS.values():
                q, k, v = (
                    torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                    for _ in range(3)
                )
                with sdpa_kernel(backend):
                    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
                    out = forward()
                    backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
                    ahead, back = burst_s(forward, count), burst_s(backward, count)
                speeds = work / ahead, 2.5 * work / back, 3.5 * work / (ahead + back)
                row += [f"{speed / 1e12:.0f}" for speed in speeds]
            yield row


def context() -> Iterator[list[str]]:
    """A row for each shape and for the ranks that have the least to merge, the most, and the last."""
    for name, heads, key_heads, width, length, size in CONTEXTS:
        q = torch.randn(1, length, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        keys_values = torch.randn(2, 1, key_heads, length, width, device="cuda", dtype=torch.bfloat16)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            share = [1e3 * seconds / size for seconds in _both_s(_square, q, keys_values)]
        by_ranks = _by_ranks(keys_values, size)
        for rank in sorted({0, 1, size - 1}):
            where = positions(length, size, rank, q.device)
            mine, row = q[:, :, where].transpose(1, 2).contiguous().transpose(1, 2), [f"{name}, {length}", f"{rank}"]
            expected = _masked(mine, keys_values, where) if mine[..., 0].numel() * length < MOST_SCORES else []
            errors = []
            wanted = [*expected[:2], *(_by_ranks(each, size) for each in expected[2:])]
            for run in (partial(attend_to_the_ends, rank=rank), partial(_in_parts, rank=rank)):
                row += [f"{1e3 * seconds:.2f}" for seconds in _both_s(run, mine, by_ranks)]
                pairs = zip(_results(run, mine, by_ranks), wanted, strict=False)
                errors.append(max((float((a.float() - b).norm() / b.norm()) for a, b in pairs), default=0.0))
            yield row + [f"{each:.2f}" for each in share] + [f"{error:.1e}" if error else "" for error in errors]


Attending = Callable[[Tensor, Tensor], Tensor]
"""Queries, and keys and values in one, to what comes of them."""


def _square(q: Tensor, keys_values: Tensor) -> Tensor:
    k, v = keys_values
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _by_ranks(keys_values: Tensor, size: int) -> Tensor:
    """Those of a sequence as each rank has them."""
    places = [positions(keys_values.shape[3], size, rank, keys_values.device) for rank in range(size)]
    return torch.stack([keys_values[..., where, :] for where in places])


def _in_parts(q: Tensor, keys_values: Tensor, rank: int) -> Tensor:
    output: Tensor = merged_parts(q, keys_values, rank)[0]
    return output


def _both_s(run: Attending, *given: Tensor) -> tuple[float, float]:
    """Seconds forward and backward."""
    inputs = [each.detach().requires_grad_() for each in given]
    out = run(*inputs)
    backward = partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)
    return burst_s(partial(run, *inputs), 3), burst_s(backward, 3)


def _results(run: Attending, *given: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of what is given."""
    inputs = [each.detach().requires_grad_() for each in given]
    out = run(*inputs)
    above = torch.cos(torch.arange(out.numel(), device=out.device)).bfloat16().to(out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, above)]


def _masked(q: Tensor, keys_values: Tensor, where: Tensor) -> list[Tensor]:
    """`_results` in fp32, of queries at the positions `where`."""
    repeats, mask = q.shape[1] // keys_values.shape[2], where[:, None] >= torch.arange(keys_values.shape[3]).to(where)

    def run(q: Tensor, keys_values: Tensor) -> Tensor:
        k, v = keys_values.repeat_interleave(repeats, dim=2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return _results(run, q.float(), keys_values.float())


def products() -> Iterator[list[str]]:
    """A row for each shape."""
    for rows, inside, outside in SHAPES:
        x = torch.randn(rows, inside, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(outside, inside, device="cuda", dtype=torch.bfloat16)
        work, row = 2.0 * rows * inside * outside, [f"{rows} x {inside} x {outside}"]
        runs: list[Callable[[], object]] = [partial(torch.mm, x, w.t()), _in_fp8(x, w, True), _in_fp8(x, w, False)]
        once = [burst_s(run, max(1, int(BURST_S * 1e15 / work))) for run in runs]
        each_s = once + [long_s(run, seconds) for run, seconds in zip(runs, once, strict=True)]
        yield row + [f"{work / seconds / 1e12:.0f}" for seconds in each_s]


def _in_fp8(x: Tensor, w: Tensor, fast: bool) -> Callable[[], object]:
    one = torch.ones((), device=x.device)
    x8, w8 = ((60 * each).to(torch.float8_e4m3fn) for each in (x, w))

    def run() -> Tensor:
        return torch._scaled_mm(x8, w8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return run


TABLES: dict[str, tuple[Callable[[], Iterator[list[str]]], list[str]]] = {
    "attention": (
        attention,
        ["width", "tokens", *(f"{name} {way}" for name in BACKENDS for way in ("forward", "backward", "both"))],
    ),
    "context": (
        context,
        [
            *("model, tokens", "rank"),
            *(f"{name} {way}" for name in ("FlashAttention-2", "parts", "share") for way in ("forward", "backward")),
            *(f"error, {name}" for name in ("FlashAttention-2", "parts")),
        ],
    ),
    "products": (
        products,
        ["product", *(f"{name}{when}" for when in ("", ", long") for name in ("bf16", "fp8 fast", "fp8"))],
    ),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=TABLES)
    arguments = parser.parse_args(argv)
    if torch.version.hip is not None or not torch.cuda.is_available():
        parser.exit(2, "kernels: takes a GPU of NVIDIA's\n")
    measured, headings = TABLES[arguments.what]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, time.strftime("%Y-%m-%d"))
    print(render(headings, list(measured())))


if __name__ == "__main__":
    main()
