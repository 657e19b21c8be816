"""Imported by the fork server of trials alone, before anything else: it ends with its worker, and its forks with it.

What it imports afterwards takes about half of the time.
"""

import gc
import os
import sys
from typing import Any

from trainables.leftovers import end_with_parent


def _collect() -> None:
    """What was imported stays, and is nothing for a fork's collections to go through."""
    gc.freeze()
    gc.enable()


end_with_parent()

# Imports leave little garbage, and collections go through all that there is again and again.
gc.disable()
os.register_at_fork(after_in_child=_collect)

# DeepSpeed comes with a tuner, which imports MLflow wherever that is installed. Nothing in a trial writes to MLflow.
modules: dict[str, Any] = sys.modules
modules["mlflow"] = None
