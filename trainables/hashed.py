"""What compilers know their own caches by: a hash of all their sources, which each process makes once.

The server that trials are forked from makes it as it imports this, so that no trial does: 0.1 and 0.3 s of each.
"""

import contextlib
import sys

if "torch._inductor.codecache" in sys.modules:
    from torch._inductor.codecache import torch_key

    torch_key()

with contextlib.suppress(ImportError):  # builds of torch for CPUs come without Triton
    from triton.runtime.cache import triton_key

    triton_key()
