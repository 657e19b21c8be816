"""Parameters by what is gathered and summed up together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from search_spaces.models import ModelShape


def block_of(layer: int) -> str:
    return f"block {layer}"


def experts_of(layer: int) -> str:
    return f"experts {layer}"


def is_of_experts(group: str) -> bool:
    return group.startswith("experts")


def ends_of(model: ModelShape) -> tuple[str, str]:
    """The groups of the embedding and of the head: tied tables are one."""
    return ("ends", "ends") if model.tie_embeddings else ("embedding", "head")


def groups_of(model: ModelShape, spread_over: int = 1) -> dict[str, dict[str, int]]:
    """Parameters by what is gathered and summed up together, in the order of the model: tied tables are one group, and
    experts another than what else their block has. Of a rank of `spread_over` that have other experts each."""
    hidden, inner, queries, keys = model.hidden, model.ffn_hidden, model.query_width, model.key_width
    is_gpt = model.family == "gpt"

    def norm(name: str) -> dict[str, int]:
        return {f"{name} {index}": hidden for index in range(2 if is_gpt else 1)}

    def products(**sizes: tuple[int, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, (inside, outside) in sizes.items():
            found[name] = inside * outside
            if is_gpt:
                found[f"{name} bias"] = outside
        return found

    embedding = {"tokens": model.vocab * hidden} | ({"positions": model.max_sequence_length * hidden} if is_gpt else {})
    head = norm("norm")
    block = norm("attention norm")
    block |= products(wq=(hidden, queries), wk=(hidden, keys), wv=(hidden, keys), wo=(queries, hidden))
    block |= norm("ffn norm")
    experts: dict[str, int] = {}
    if model.num_experts:
        block["router"] = hidden * model.num_experts
        experts = dict.fromkeys(("gate", "up", "down"), model.num_experts // spread_over * hidden * inner)
    else:
        gate = {} if is_gpt else {"gate": (hidden, inner)}
        block |= products(**gate, up=(hidden, inner), down=(inner, hidden))
    groups = {"ends": embedding | head} if model.tie_embeddings else {"embedding": embedding}
    for layer in range(model.layers):
        groups |= {block_of(layer): block} | ({experts_of(layer): experts} if experts else {})
    return groups if model.tie_embeddings else groups | {"head": head | {"output": model.vocab * hidden}}


def parameters_of(groups: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, int]]:
    """Each parameter's name among those of all groups, and its values, in the order of the model."""
    for group, parameters in groups.items():
        for name, count in parameters.items():
            yield f"{group} {name}", count
