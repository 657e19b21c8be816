"""Plain PyTorch: a small language model by DistributedDataParallel. Two lines of it tell Wattune of its steps.

torchrun --nproc-per-node 2 examples/plain_pytorch.py --steps 20
"""

import argparse
import os

import torch
import torch.distributed as dist
import wattune_steps  # the first of the two; the file may be copied beside this one
from torch import nn

parser = argparse.ArgumentParser()
for name, value in [("micro-batch-size", 2), ("global-batch-size", 8), ("hidden", 64), ("layers", 2), ("steps", 10**9)]:
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
args = parser.parse_args()
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.set_default_device(device)
torch.manual_seed(dist.get_rank())
block = nn.TransformerEncoderLayer(args.hidden, 4, 4 * args.hidden, dropout=0.0, batch_first=True, norm_first=True)
body = nn.TransformerEncoder(block, args.layers, enable_nested_tensor=False)
layers = nn.Sequential(nn.Embedding(256, args.hidden), body, nn.Linear(args.hidden, 256))
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
microbatches = args.global_batch_size // (args.micro_batch_size * dist.get_world_size())
tokens = torch.arange(33).repeat(args.micro_batch_size, 1)  # to be learnt: each token's successor

for _ in range(args.steps):
    for _ in range(microbatches):
        inputs = tokens + torch.randint(200, (args.micro_batch_size, 1))
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(inputs[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), inputs[:, 1:].flatten())
        (loss / microbatches).backward()
    optimizer.step()
    optimizer.zero_grad()
    wattune_steps.step(loss=loss)  # the second
