"""A program that knows nothing of Wattune: it logs its steps, and goes wrong as it is told."""

import itertools
import sys
import time

fault = sys.argv[1]
for step in itertools.count(1):
    time.sleep(0.05)
    if step == 4 and fault == "oom":
        raise MemoryError("no room for the activations")
    if step == 4 and fault == "crash":
        raise RuntimeError("the data ended")
    if step == 4 and fault == "hang":
        time.sleep(3600)
    loss = float("nan") if step == 4 and fault == "nan" else 5 / step
    print(f"step {step} loss {loss}")
