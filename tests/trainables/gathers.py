"""What DeepSpeed's ZeRO-3 gathers and lets go of, in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.rank import Rank
from trainables.training import Training
from trainables.world import GangWorld

PRIVATE = "_PartitionedParameterCoordinator__"


@dataclass(frozen=True)
class Gathers(Training):
    """Trains by ZeRO-3, and writes FOLDER/RANK.json: of each microbatch, how many values are gathered together, and let
    go of, one after the other. `most_live` and `near` are DeepSpeed's settings."""

    folder: str
    most_live: int
    near: int

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        rank = Rank(self, request, place, on_progress, GangWorld)
        coordinator = rank.engine.engine.optimizer.parameter_offload.get_param_coordinator()  # type: ignore[attr-defined]
        told: list[list[tuple[str, int]]] = []

        def before(name: str, tell: Callable[..., None]) -> None:
            known = getattr(coordinator, name)

            def telling(*arguments: Any) -> None:
                tell(*arguments)
                known(*arguments)

            setattr(coordinator, name, telling)

        def gather(parameters: Any, *_: Any) -> None:
            if count := sum(one.ds_numel for one in parameters if one.ds_status.name == "NOT_AVAILABLE"):
                told[-1].append(("gather", count))

        def let_go(parameter: Any, *_: Any) -> None:
            if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_active_sub_modules:
                told[-1].append(("let go", parameter.ds_numel))

        setattr(coordinator, f"{PRIVATE}max_n_available_params", self.most_live)
        setattr(coordinator, f"{PRIVATE}max_reuse_dist_in_numel", self.near)
        before(f"{PRIVATE}all_gather_params", gather)
        before(f"{PRIVATE}release_param", let_go)
        before("reset_step", lambda: told.append([]))
        report = rank.report()
        (Path(self.folder) / f"{rank.world.rank}.json").write_text(json.dumps(told))
        return report
