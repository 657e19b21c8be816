"""What kernels do around the products of grouped experts, between the router and the sum of what these made."""

from __future__ import annotations

from typing import NamedTuple


class Around(NamedTuple):
    """Of tokens that have two experts each.

    - `hidden`, `hidden_back`: values that kernels read and write forward and backward for one of the hidden states, for
      each of its token's experts.
    - `between`, `between_back`: likewise for one between an expert's products.
    - `fixed_s`, `fixed_back_s`: seconds of the many small kernels by which tokens find their experts, however many
      these are. `token_s`: seconds forward of each token beside.
    - `each_s`: seconds of each expert's product beyond its roofline.
    """

    hidden: float
    hidden_back: float
    between: float
    between_back: float
    fixed_s: float = 0.0
    fixed_back_s: float = 0.0
    token_s: float = 0.0
    each_s: float = 0.0


EAGER = Around(8, 17, 5, 9, fixed_s=0.26e-3, fixed_back_s=0.28e-3, token_s=11e-9)
"""By the kernels of `trainables/moe.py`: tokens in the order of their experts and back, the product with the gate, the
sum, and what the router reads; and gradients of all of these, and of what goes into two products. The seconds are
fitted to experts that were timed alone on H100 and H200, 38 configurations of 4,096 to 65,536 tokens and four or eight
experts: 1.8% off forward and 2.4% backward."""

COMPILED = EAGER._replace(hidden=6, hidden_back=12, token_s=0.0)
"""Nothing compiles what lies between router and sum, but product and sum with the gate are one kernel, and those of the
choice few. 39 configurations: 2.3% off forward and 2.7% backward."""

FUSED = Around(4, 8, 3, 6, each_s=9e-6)
"""By Transformer Engine's kernels: tokens in the order of their experts, and back with the sum (`moe_permute` and
`moe_unpermute`), and the activation function in one. Nobody timed these: an expert's product takes as long more as
torch's do of four and eight experts if nothing else is fixed."""
