"""The facts in which engines differ: what the rules, the memory model and the cost model ask of an engine.

Where an engine says nothing it is taken to be as torch's own primitives are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from search_spaces.attention import CUDNN, FLASH_2, FLASH_2_JOULES_ON_HOPPER, FLASH_2_ON_HOPPER, Kernel
from search_spaces.coefficients import Coefficients
from search_spaces.experts import COMPILED, EAGER, Around
from search_spaces.hardware import Accelerator
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.parameters import Held
from search_spaces.workload import Workload

Rule = Callable[[Layout, Workload], str | None]
"""The reason for which a layout is illegal, or None where it is legal."""

Condition = Callable[[Layout], bool]
Same = Callable[[Any, Layout], Any]


def flash_2(accelerator: Accelerator) -> Kernel:
    """FlashAttention-2, than which none is faster before Hopper."""
    if not accelerator.fp8:
        return FLASH_2
    return FLASH_2.slower(FLASH_2_ON_HOPPER, FLASH_2_ON_HOPPER)._replace(joules=FLASH_2_JOULES_ON_HOPPER)


@dataclass(frozen=True)
class States:
    """Bytes that a GPU has of parameters, gradients and optimizer states at the start of a step's last backward pass.

    `late`: gradients that this pass makes, one part after the other. `copied`: of gradients, for the update, where the
    copy finds no room in what is given free before it.
    """

    parameters: float
    gradients: float
    optimizer: float
    late: float
    copied: float = 0.0


class EngineFacts(ABC):
    """What is known of an engine without running it. Layouts that are asked about are legal ones of the engine."""

    name: ClassVar[str]

    # What may be tried

    unused: ClassVar[Mapping[str, Condition]] = {}
    """Axis -> in which layouts, settled up to it, the engine has no use for it; see `Axis.idle`."""

    same: ClassVar[Mapping[str, Same]] = {}
    """Axis -> the value as which one is written that has the same effect, in a layout settled up to it."""

    lacks: ClassVar[Mapping[str, tuple[Rule, ...]]] = {}
    """Axis -> rules that say which settings the engine does not have, judged before those of all engines."""

    rules: ClassVar[Mapping[str, tuple[Rule, ...]]] = {}
    """Axis -> rules of the engine, judged after those of all engines."""

    fp8: ClassVar[bool] = False
    """Whether it has matrix products in 8-bit floats."""

    is_ours: ClassVar[bool] = True
    """Whether it trains models of `search_spaces.models` as `trainables` does: else only what holds for any program
    is a rule for it."""

    fp8_gain: ClassVar[float] = 1.0
    """Speed of its products in fp8, in that of `Coefficients.fp8_speed`."""

    fp8_experts: ClassVar[bool] = False
    """Whether it has them in experts, too."""

    fills_pipelines: ClassVar[bool] = True
    """Whether its pipelines need as many microbatches as ranks."""

    empty_ends: ClassVar[bool] = False
    """Whether the first and the last stage may be without blocks."""

    # How it trains

    splits_tables: ClassVar[bool] = True
    """Whether tensor parallelism splits embedding and head, and with them logits and loss."""

    exchanges_heads: ClassVar[bool] = False
    """Whether context parallelism exchanges heads for tokens (Ulysses, Jacobs et al. 2023), and does not gather keys
    and values (Grattafiori et al. 2024, section 3.3)."""

    rings_keys: ClassVar[bool] = False
    """Whether context parallelism sends keys and values around while it computes (Liu et al. 2023), and keeps its own
    alone."""

    rings_heads: ClassVar[bool] = False
    """Whether it does so with a key and a value for each head of queries, kernel by kernel."""

    gathers_beside: ClassVar[bool] = False
    """Whether a compiled block computes queries while keys and values are gathered, and gradients of as much while
    theirs are summed."""

    scores_traffic: ClassVar[int] = 0
    """Bytes that kernels move forward for a score of attention; 0 where it is fused, and keeps no scores."""

    gathers_again: ClassVar[bool] = False
    """Whether backward passes gather inputs of split products again, where sequence parallelism splits them."""

    selects_products: ClassVar[bool] = False
    """Whether selective recomputation computes every other product of a block again, of those in fp8 all."""

    sequence_first: ClassVar[bool] = False
    """Whether tokens come before sequences in hidden states, whose parts then are gathered and scattered in place."""

    copies_one_sequence: ClassVar[bool] = True
    """Whether those of a microbatch of one sequence are copied for it nonetheless."""

    eager_copies: ClassVar[int] = 20
    """Values that eager kernels read and write forward for one of the hidden states, where tokens are split and do not
    come first: for two gathers and two scatters by DTensors. Fitted."""

    splits_sends: ClassVar[bool] = False
    """Whether tensor-parallel ranks send a part each of hidden states that all have, which the receivers gather."""

    sends_one_by_one: ClassVar[bool] = False
    """Whether a rank of a pipeline waits for each message that it sends or receives before it goes on."""

    beside_messages: ClassVar[Mapping[str, float]] = {}
    """Share of a pipeline rank's passes, by schedule, in which NCCL's kernels have a message of it under way or await
    one; 0 of a schedule that is not named, as where messages come between passes."""

    fills_experts: ClassVar[bool] = False
    """Whether experts, computed one after the other, all make room for as many tokens as the fullest needs."""

    launched_ms: ClassVar[Mapping[str, Mapping[str, tuple[float, float]]]] = {
        "gpt": {"none": (2.8, 2.6), "selective": (7.0, 2.5), "full": (4.4, 4.6)},
        "llama": {"none": (3.5, 2.3), "selective": (8.1, 2.7), "full": (6.2, 3.4)},
        "experts": {"none": (5.2, 4.8), "selective": (12.6, 16.4), "full": (8.5, 8.5)},
    }
    """Milliseconds of the CPU for a block, forward and backward in bf16, by what is in it and by what of it is computed
    again: eager, and compiled. Of 104 launches on five hosts of H100 and H200 this is the mode's part, as the
    logarithms of mode and host add up; the hosts are within 10% of their mean. What neither says is 11%, as much as a
    launch differs by that is measured again (benchmarks/results/README.md)."""

    launched_per_expert: ClassVar[float] = 0.0
    """The part of it by which a block of experts takes the CPU longer for each of a rank's beyond four."""

    launched_more_ms: ClassVar[Mapping[str, tuple[float, float]]] = {
        "tensor": (4.0, 2.4),
        "sequence": (1.5, 1.5),
        "context": (2.0, 1.1),
        "experts": (2.9, 2.8),
        "reduces": (0.9, 1.0),
        "gathers": (3.3, 3.5),
    }
    """Milliseconds of the CPU more for a block, eager and compiled, that is tensor-parallel, with its tokens split or
    not, whose sequence or experts are spread, whose gradients are reduced with each microbatch (ZeRO-2), or whose
    parameters are gathered as well (ZeRO-3). As tiny models have it on a CPU, where these add up within 5%, times two,
    as blocks on one GPU take the hosts of GPUs, what tensor parallelism takes as on two hosts of H100, and what spread
    experts take as 21 launches of five runs (benchmarks/results/README.md), unless an engine says otherwise."""

    routes_evenly: ClassVar[bool] = False
    """Whether all experts have as many tokens, as benchmarks make routers deal them out."""

    sums_inputs_apart: ClassVar[bool] = False
    """Whether tensor parallelism sums the gradients of what goes into each matrix product apart."""

    releases_gradients: ClassVar[bool] = True
    """Whether gradients are let go of with each step, so that its first backward pass finds none."""

    shards_by_tensors: ClassVar[bool] = False
    """Whether ZeRO gives whole tensors to ranks, which broadcast them once they are updated; gradients are summed over
    all ranks at once."""

    fuses_casts: ClassVar[bool] = False
    """Whether kernels cast to fp8 and transpose at once, by scales that are known before."""

    gathers_in_place: ClassVar[bool] = False
    """Whether gathered parameters are used where they arrive, and not copied from there."""

    rotary_values: ClassVar[float] = 24.0
    """Values that kernels of rotary positions read and write forward for one of queries and keys, where nothing is
    compiled. Twice as many are backward."""

    compiled_rotary_values: ClassVar[float] = 2.0
    """The same where blocks are compiled."""

    norm_values: ClassVar[float] = 5.0
    """Values that kernels read and write forward for one of the hidden states at a norm with the sum before it, where
    nothing is compiled. Twice as many are backward."""

    compiles_loss: ClassVar[bool] = True
    """Whether the loss is compiled where blocks are."""

    loss_traffic: ClassVar[int] = 40
    """Bytes that kernels move for a logit and its gradient, where the loss is not compiled: in fp32, one by one."""

    shared_loss_bytes: ClassVar[int] = 24
    """Bytes of a logit, where tensor-parallel ranks share the loss, which has exponentials besides. Fitted."""

    shared_loss_traffic: ClassVar[int] = 100
    """Bytes that kernels move for such a logit: its sums are apart."""

    allocates: ClassVar[Literal["sharded", "flat"] | None] = None
    """How it has its states on one GPU, where `search_spaces.replay` knows in which order it allocates: by FSDP2, or in
    flat tensors from the start. None where that is not known."""

    update_bytes: ClassVar[int] = 46
    """Memory traffic of the update of one parameter: fp32 gradient, weight and two moments, clipping by their norm, and
    copies in the width of matrix products."""

    def has_use(self, axis: str, layout: Layout) -> bool:
        """Whether the engine has use for an axis in a layout that is settled up to it."""
        return axis not in self.unused or not self.unused[axis](layout)

    def around_experts(self, compiled: bool) -> Around:
        """What its kernels do around grouped experts, in blocks that are compiled or not."""
        return COMPILED if compiled else EAGER

    def attention(self, accelerator: Accelerator, is_square: bool) -> Kernel:
        """The kernel of its attention, which is not square where queries are of fewer tokens than keys.

        That of scaled dot-product attention as torch has it: cuDNN's on Hopper, elsewhere FlashAttention-2's.
        """
        return CUDNN if accelerator.fp8 else FLASH_2

    def leaves_out_last(self, layout: Layout) -> bool:
        """Whether full recomputation of a block without experts ends at the last input that a backward pass needs, and
        so before the last product and its sum over ranks, as torch's does since 2.1 (`torch.utils.checkpoint`)."""
        return True

    def hides_sends(self, layout: Layout) -> bool:
        """Whether hidden states are on their way between pipeline ranks while these compute."""
        return False

    def keeps_parameters(self, layout: Layout) -> bool:
        """Whether each rank keeps all of its model's parameters in one tensor, where it gathers those that others have
        updated."""
        return False

    def adds_biases(self, layout: Layout) -> bool:
        """Whether eager products add their biases by a kernel of its own."""
        return False

    def autocasts(self, layout: Layout) -> bool:
        """Whether weights and gradients are in fp32 and products in bf16."""
        return False

    def eager_loss_bytes(self, layout: Layout) -> int:
        """Bytes of a logit, where the loss is not compiled, which has log-probabilities and two gradients in fp32
        besides, and what the allocator loses to tensors of such a size. Fitted."""
        return 20

    def sum_width(self, layout: Layout) -> int:
        """Bytes of a gradient on its way between ranks."""
        return 4 if "fp32" in (layout.precision, layout.reduce_precision) or self.autocasts(layout) else 2

    def follows_router(self, layout: Layout) -> bool:
        """Whether how many tokens the experts of a GPU get is for a router to say."""
        return layout.expert_parallel_size > 1 and not self.routes_evenly

    def sums_whole(self, layout: Layout) -> bool:
        """Whether every rank is sent all of the summed gradients, and not its shard alone."""
        return layout.zero_stage == 0

    def gathered_bytes(self, layout: Layout, layers: int, held: Held) -> float:
        """Bytes of the parameters of a GPU with so many layers, as they are gathered."""
        return layout.width * held.whole

    def messages(self, layout: Layout, layers: int, parameters: float) -> int:
        """In how many pieces a GPU with so many layers and parameters sends gradients."""
        return layers + 2

    def gathers(self, layout: Layout, layers: int, parameters: float) -> int:
        """In how many it gathers the parameters."""
        return self.messages(layout, layers, parameters)

    def launch_s(self, layout: Layout, calibration: Coefficients) -> float:
        """Seconds of the CPU for a block and a microbatch, in addition to those that it takes in usual modes."""
        return 0.0

    def waits_for_gpu(self, layout: Layout, model: ModelShape) -> bool:
        """Whether the CPU waits in each block for some of what it gave the GPU before."""
        return False

    def sent_bytes(self, layout: Layout) -> float:
        """Bytes that a GPU moves for each gradient of a microbatch, until it is where it is sent from or summed up."""
        return layout.width + self.sum_width(layout)

    def recomputes_in_graphs(self, layout: Layout, model: ModelShape) -> bool:
        """Whether compiled blocks compute again by themselves, so that their parameters are not gathered once more."""
        return False

    def lead_is_short(self, layout: Layout) -> bool:
        """Whether the CPU may be no more than parts of a block ahead of what the GPU has gathered."""
        return False

    def memory_is_measured(self, layout: Layout, model: ModelShape) -> bool:
        """Whether the memory model was set by layouts of this kind, as far as that depends on the engine."""
        return False

    @abstractmethod
    def states(self, layout: Layout, held: Held) -> States:
        """Of a GPU that holds `held`."""

    def pipeline_loss_bytes(self, layout: Layout) -> int:
        """Bytes of a logit that a pipeline has besides, where the loss is not compiled: torch's holds the logits
        themselves until the pass comes back."""
        return layout.width

    def parts_on_their_way(self, layout: Layout, held: Held) -> float:
        """Bytes of parameters that are being gathered and of gradients that are being reduced.

        FSDP2 has of the largest part what is gathered, before and after it is taken apart, and its gradients, as they
        come, on their way, and arrived.
        """
        return (3 * layout.width + 2 * self.sum_width(layout)) * held.largest

    def hidden_states_on_their_way(self, layout: Layout, first: bool, last: bool, in_flight: int) -> int:
        """Hidden states of a microbatch, and gradients of them, that a rank of a pipeline has for or from others.

        What came forward is counted with the blocks, which keep it. `first`, `last`: whether the rank holds that end of
        the model; `in_flight`: passes whose activations it keeps. torch keeps what a stage has sent forward until the
        pass comes back, and the last gradient that it sent. Schedules of several stages a rank post receives ahead, at
        the ends of the pipeline up to one for each rank.
        """
        if layout.virtual_pipeline_stages > 1:
            return in_flight + layout.pipeline_parallel_size + 1
        return (0 if last else in_flight) + 1 + (0 if first else 1)
