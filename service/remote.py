"""Where Ray's actors run, and calls of them that a type checker follows: Ray's own handles have no methods it knows."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from ray import ObjectRef
from ray.actor import ActorHandle

# What takes no CPU has to ask for something, to be on the head, which a search needs anyway. Every head has this.
ON_HEAD = {"node:__internal_head__": 0.001}

Actor = TypeVar("Actor")
Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


@overload
def call(
    actor: ActorHandle[Actor],
    method: Callable[Concatenate[Actor, Arguments], Coroutine[Any, Any, Answer]],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> ObjectRef[Answer]: ...


@overload
def call(
    actor: ActorHandle[Actor],
    method: Callable[Concatenate[Actor, Arguments], Answer],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> ObjectRef[Answer]: ...


def call(actor: Any, method: Any, *arguments: Any, **named: Any) -> Any:
    """Have `actor` run a method of its class, such as `call(mailbox, Mailbox.give_up, cause)`. Returns at once."""
    return getattr(actor, method.__name__).remote(*arguments, **named)
