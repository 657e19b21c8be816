"""What the `megatron` engine allocates in ways of its own."""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.replay.graphs import Graphs

TIED = "ends"
"""The group of a tied table."""

REDUCING = 1
"""The stream on which FSDP2 makes the gradients of its shards."""


class Sharded(Graphs):
    """The `megatron` engine, by FSDP2 of a single rank: parameters are cast group by group as they are needed,
    gradients of microbatches are summed in fp32 and copied to those of the shards after the last, and the first step
    ends with the moments of Adam."""

    shards = 1
    """Ranks that hold a part of each parameter."""

    def start(self) -> None:
        """Each part of the model is made whole, and then copied to what the rank holds of it: experts before what else
        their block has, and what tied tables are in last."""
        self.gathered: set[str] = set()
        self.summed: set[str] = set()
        self.has_moments = self.is_sending = False
        made: list[str] = []
        for group in self.groups:
            self.make(group)
            made.append(group)
            if group != TIED and not (self.has_mixture and group.startswith("block")):
                while made and made[-1] != TIED:
                    self.shard(made.pop())
        if made:
            self.make_head()
            self.shard(TIED)

    def make_head(self) -> None:
        """A tied one has a table of its own, which is dropped for the embedding's before that is sharded."""
        self.take("table", self.groups[TIED]["tokens"], 4)
        self.give_back("table")

    def shard(self, group: str) -> None:
        """Copy all of a group's parameters to what the rank holds of them, before any is let go of."""
        for name, count in self.groups[group].items():
            self.take(f"shard {group} {name}", count / self.shards, 4)
        self.give_back(*(f"whole {group} {name}" for name in self.groups[group]))

    def make(self, group: str) -> None:
        """What FSDP2 is given of a group's parameters."""
        for name, count in self.groups[group].items():
            self.take(f"whole {group} {name}", count, 4)

    def gather(self, group: str) -> None:
        if group in self.gathered:
            return
        self.gathered.add(group)
        for name, count in self.groups[group].items():
            self.take("next cast", count)
            if self.holds("cast"):
                self.give_back("cast")
            self.rename("next cast", "cast")
            self.take(f"{group} {name}", count)
        self.give_back("cast")

    def gradient(self, group: str, name: str) -> None:
        self._make_gradient(group, name, self.made(group, name))
        self.work_on_bias(name, self.made(group, name))

    def work_on_bias(self, name: str, count: int) -> None:
        """What an eager one's gradient is summed up in, which a graph does by itself."""
        if name.endswith("bias") and not self.compiled:
            self.work_on_sum(self.tokens, count)

    def made(self, group: str, name: str) -> int:
        """Of how many values autograd makes a gradient."""
        return self.groups[group][name]

    def sum_up(self, group: str, is_last: bool) -> None:
        parameters = self.groups[group]
        new = [f"gradient {group} {name}" for name in parameters]
        if group in self.summed:
            self.give_back(*new)
        elif not is_last:
            for name in parameters:
                self.take(f"sum {group} {name}", self.made(group, name), 4)
                self.give_back(f"gradient {group} {name}")
            self.summed.add(group)
        if is_last:
            made = [f"sum {group} {name}" for name in parameters] if group in self.summed else new
            self.reduce(group, made)

    def reduce(self, group: str, made: Sequence[str]) -> None:
        """Copy what was `made` of a group's gradients to those of the shard, and let go of its parameters."""
        self.let_go(group)
        self.send(group, made)

    def let_go(self, group: str) -> None:
        """Of parameters in the width of products."""
        self.give_back(*(f"{group} {name}" for name in self.groups[group]))
        self.gathered.remove(group)

    def send(self, group: str, made: Sequence[str]) -> None:
        """Put gradients together, in the place of those of the group before, and have those of the shard."""
        if self.is_sending:
            self.give_back("sent")
        self.is_sending = True
        self.take("sent", sum(self.groups[group].values()), 4)
        self.give_back(*made)
        self.summed.discard(group)
        self.take_late(group)

    def take_late(self, group: str) -> None:
        self.take(f"late {group}", sum(self.groups[group].values()), 4, REDUCING)

    def step(self) -> None:
        self.give_back(*[name for name in self.live if name.startswith("late ")])
        super().step()

    def end(self) -> None:
        if self.is_sending:
            self.give_back("sent")
        self.is_sending = False
        if not self.has_moments:
            self.has_moments = True
            for group, parameters in self.groups.items():
                for name, count in parameters.items():
                    self.take(f"first {group} {name}", count / self.shards, 4)
                    self.take(f"second {group} {name}", count / self.shards, 4)
        self.late = 4.0 * sum(sum(parameters.values()) for parameters in self.groups.values()) / self.shards
