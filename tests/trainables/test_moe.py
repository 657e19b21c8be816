from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from search_spaces.models import ModelShape
from trainables import moe as moe_module
from trainables.model import Parts, SwiGLU
from trainables.moe import ONE_PROCESS, ExpertLayout, MoE, balance_loss, choose_experts
from trainables.tensor_ranks import TensorRanks

SHAPE = ModelShape(
    "llama", 2, 16, 4, 2, 24, 64, 16, num_experts=4, experts_per_token=2, router_aux_loss=0.5
)  # a weight of the loss that its gradient can be seen through
BATCH, LENGTH = 4, 8


def enlarge(module: nn.Module) -> None:
    """Larger weights, for clear choices and gradients."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(10)


def mixture(shape: ModelShape, layout: ExpertLayout = ONE_PROCESS, favourites: int = 0) -> MoE:
    """The feed-forward network of a model's second block, whose router is for the first experts if there are
    `favourites`."""
    moe = Parts(shape, torch.arange(LENGTH), 0, layout).block(1).ffn
    assert isinstance(moe, MoE)
    enlarge(moe)
    with torch.no_grad():
        moe.router.weight[:favourites, 0] += 8
    return moe


def inputs() -> tuple[Tensor, Tensor]:
    """Hidden states, and what the gradient of the mean over them is."""
    generator = torch.Generator().manual_seed(1)
    x, upstream = torch.randn(2, BATCH, LENGTH, SHAPE.hidden, generator=generator)
    x[..., 0] = 1.0
    return x, upstream


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def by_definition(x: Tensor, router: Tensor, experts: list[SwiGLU], per_token: int) -> tuple[Tensor, Tensor]:
    """Output and balancing loss, one token and one expert after the other, which tokens take in turn."""
    outs, losses, turn = [], [], cycle(range(len(experts)))
    for sequence in x:
        choices, probabilities, out = [0] * len(experts), torch.zeros(len(experts)), []
        for token in sequence:
            best = [next(turn) for _ in range(per_token)]
            exponents = torch.exp(router @ token)
            probability = torch.where(torch.tensor([i in best for i in range(len(experts))]), exponents, 0.0)
            probability = probability / probability.sum()
            for i in best:
                choices[i] += 1
            total = sum(probability[i] for i in best)
            out.append(torch.stack([probability[i] / total * experts[i](token) for i in best]).sum(dim=0))
            probabilities = probabilities + probability
        outs.append(torch.stack(out))
        shares = torch.tensor(choices) / (len(sequence) * per_token)
        losses.append(len(experts) * (shares * probabilities / len(sequence)).sum())
    return torch.stack(outs), torch.stack(losses).mean()


@pytest.mark.parametrize(("experts", "per_token"), [(4, 1), (4, 2), (3, 2), (5, 3), (48, 1)])
def test_mixture_is_its_definition_token_by_token(experts: int, per_token: int) -> None:
    shape = replace(SHAPE, num_experts=experts, experts_per_token=per_token)
    moe, (x, upstream) = mixture(shape), inputs()
    parts = Parts(shape, torch.arange(LENGTH), 0)
    separate = [parts.expert(1, index) for index in range(experts)]
    for expert in separate:
        enlarge(expert)
    router, wanted_x = moe.router.weight.detach().clone().requires_grad_(), x.clone().requires_grad_()
    wanted, loss = by_definition(wanted_x, router, separate, per_token)
    ((wanted * upstream).mean() + shape.router_aux_loss * loss).backward()

    out = moe(x.requires_grad_())
    (out * upstream).mean().backward()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient(x), gradient(wanted_x), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient(moe.router.weight), gradient(router), rtol=1e-4, atol=1e-6)
    for index, expert in enumerate(separate):
        for name, layer in expert.named_children():
            weight, found = layer.get_parameter("weight"), gradient(moe.experts.get_parameter(name))[index]
            wanted_gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad  # idle: never called
            torch.testing.assert_close(found, wanted_gradient.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "count"), [(4, 1), (8, 2), (3, 2), (128, 8)])
def test_experts_get_equally_many_tokens_whatever_the_router_prefers(
    experts: int, count: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(2, 64, experts, dtype=dtype)
    logits[..., 1] += 5
    probabilities, gates, chosen = choose_experts(logits, count)
    loads = chosen.flatten().bincount(minlength=experts)
    assert loads.max() - loads.min() <= 1
    assert [len(set(token)) for token in chosen.flatten(0, 1).tolist()] == [count] * 128
    among = logits.float().gather(-1, chosen).softmax(dim=-1)
    torch.testing.assert_close(gates, among, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(probabilities.gather(-1, chosen), among, rtol=1e-4, atol=1e-5)


def test_balance_loss_is_one_at_balance_and_their_number_when_one_expert_takes_all() -> None:
    even = torch.full((3, 8, 4), 0.25)
    turns = torch.stack((torch.arange(8) % 4, (torch.arange(8) + 1) % 4), dim=-1).expand(3, 8, 2)
    assert balance_loss(even, turns).item() == pytest.approx(1.0)
    one = torch.zeros(3, 8, 4)
    one[..., 2] = 1.0
    assert balance_loss(one, torch.full((3, 8, 1), 2)).item() == pytest.approx(4.0)


def test_balance_loss_is_the_mean_over_sequences() -> None:
    probabilities = torch.randn(3, 8, 4).softmax(dim=-1)
    experts = probabilities.topk(2).indices
    each = torch.stack([balance_loss(probabilities[i : i + 1], experts[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(balance_loss(probabilities, experts), each.mean())
    assert each.std() > 1e-3


def test_loss_scale_scales_the_balance_loss_alone() -> None:
    shape = replace(SHAPE, num_experts=3)  # which cannot get equally many of 16 choices: there is something to balance
    x, upstream = inputs()
    gradients = []
    for scale in (0.0, 1.0, 2.0):
        moe = mixture(shape, ExpertLayout(loss_scale=scale))
        (moe(x) * upstream).mean().backward()
        gradients.append(gradient(moe.router.weight))
    without, once, twice = gradients
    torch.testing.assert_close(twice - once, once - without)
    assert (once - without).norm() > 1e-3


@dataclass(frozen=True)
class Spread:
    """Four ranks as data, context and tensor parallel, and among how many of the first two experts are spread. Where
    there are `favourites` routers choose alone, and ranks exchange unequally many tokens."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sp: bool = False
    favourites: int = 0
    compiled: bool = False

    def __str__(self) -> str:
        return "dp{dp} cp{cp} tp{tp} ep{ep} sp{sp} favourites{favourites} compiled{compiled}".format(**vars(self))


SPREADS = [
    Spread(dp=4),
    Spread(dp=4, ep=2),
    Spread(dp=4, ep=4),
    Spread(dp=4, ep=2, favourites=1),
    Spread(dp=4, ep=4, favourites=2),
    Spread(dp=2, tp=2),
    Spread(dp=2, tp=2, ep=2),
    Spread(dp=2, tp=2, ep=2, sp=True),
    Spread(tp=4, sp=True),
    Spread(dp=2, cp=2),
    Spread(dp=2, cp=2, ep=4),
    Spread(cp=4, ep=2),
    Spread(cp=2, tp=2, ep=2),
    Spread(cp=2, tp=2, ep=2, sp=True, favourites=2),
    Spread(cp=2, tp=2, ep=2, compiled=True),
    Spread(dp=2, tp=2, ep=2, sp=True, compiled=True),
]
RANKS = 4


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Routers choose by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_module, "evenly", lambda logits, count: logits.float())
        yield


def run_rank(rank: int, store: str) -> None:
    """One rank of every spread in turn; raises where it does not do what one process does."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    for spread in SPREADS:
        try:
            with alone() if spread.favourites else contextlib.nullcontext():
                check_spread(spread)
        except AssertionError as error:
            raise AssertionError(f"{spread}, rank {rank}: {error}") from error
    dist.destroy_process_group()


def check_spread(spread: Spread) -> None:
    mesh = init_device_mesh("cpu", (spread.dp, spread.cp, spread.tp), mesh_dim_names=("dp", "cp", "tp"))
    replicas = spread.dp * spread.cp
    experts = init_device_mesh("cpu", (replicas // spread.ep, spread.ep, spread.tp), mesh_dim_names=("dp", "ep", "tp"))
    layout = ExpertLayout(
        expert_group=experts.get_group("ep") if spread.ep > 1 else None,
        tensor_ranks=TensorRanks.of(mesh.get_group("tp"), spread.sp) if spread.tp > 1 else None,
        context_group=mesh.get_group("cp") if spread.cp > 1 else None,
    )

    def mine(whole: Tensor) -> Tensor:
        part = whole.chunk(spread.dp)[mesh.get_local_rank("dp")].chunk(spread.cp, dim=1)[mesh.get_local_rank("cp")]
        return part.chunk(spread.tp, dim=1)[mesh.get_local_rank("tp")] if spread.sp else part

    whole, (x, upstream) = mixture(SHAPE, favourites=spread.favourites), inputs()
    whole_out = whole(x.requires_grad_())
    (whole_out * upstream).mean().backward()

    moe, local = mixture(SHAPE, layout, spread.favourites), mine(x).detach().requires_grad_()
    if spread.compiled:
        moe.compile(backend="aot_eager")
    out = moe(local)
    torch.testing.assert_close(out, mine(whole_out), rtol=1e-5, atol=1e-5)
    (out * mine(upstream)).sum().mul(replicas / x.numel()).backward()
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
    close(gradient(local) / replicas, mine(gradient(x)))
    router = gradient(moe.router.weight)
    close(sum_over_ranks(router) / (replicas * spread.tp), gradient(whole.router.weight))
    assert router.equal(first_in(mesh.get_group("tp"), router))
    for name, parameter in moe.experts.named_parameters():
        wanted = gradient(whole.experts.get_parameter(name))
        placed = torch.zeros_like(wanted)
        rows, columns = moe.experts.local, moe.experts.width
        mine_of = (slice(rows.start, rows.stop), *((columns,) if name == "down" else (slice(None), columns)))
        placed[mine_of] = gradient(parameter)
        close(sum_over_ranks(placed) / replicas, wanted)


def sum_over_ranks(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def first_in(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """What the first rank of the group has for `x`."""
    first = x.clone()
    dist.broadcast(first, group=group, group_src=0)
    return first


@pytest.mark.slow
def test_experts_spread_over_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(run_rank, (str(tmp_path / "store"),), nprocs=RANKS, start_method="forkserver")
