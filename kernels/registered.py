"""Operations as torch.library knows them, for torch.compile and for tensors without numbers: a name, arguments, the shapes of results.

Outside these nothing changes: the public function is called as it is. Inside, ``fem::<operation>`` is one node of the graph, which chooses
its implementation when it runs, may look at numbers, and launches any kernel. Its backward, ``fem::<operation>_backward``, makes the
forward anew, since a node keeps its arguments alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor

F = TypeVar("F", bound=Callable[..., Any])


def _namespace() -> str:
    """Ours, or one of its own where this file is a copy, as in an exported model: an operation registered again frees the first."""
    if __name__ == "kernels.registered":
        return "fem"
    taken = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
    return next(name for name in map("fem_copy{}".format, itertools.count(1)) if name not in taken)


NAMESPACE = _namespace()


def registered(shapes: Callable[..., Any], traceable: Callable[..., bool] = lambda *_, **__: True) -> Callable[[F], F]:
    """Makes a function of tensors and settings, annotated, an operation of torch.library.

    shapes: called as the function, gives empty tensors like its results. traceable: called as the function, whether torch.compile can
    see through what a CPU does for this call, and fuse it with what is around it; on a GPU kernels run, which it cannot.
    """

    def decorate(function: F) -> F:
        defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
        names, op = list(defaults), _operation(function, defaults, shapes)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else kwargs[names[0]]
            compiling = torch.compiler.is_compiling()
            if isinstance(first, FakeTensor) if not compiling else first.is_cuda or not traceable(*args, **kwargs):
                given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
                return op(*(given[name] for name in names))
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate


def _operation(function: Callable[..., Any], defaults: dict[str, Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """``fem::<function>``, whose arguments are all positional, and its backward."""
    name, schema = f"{NAMESPACE}::{function.__name__}", torch.library.infer_schema(function, mutates_args=()).replace("*, ", "")
    arguments = schema[1 : schema.rindex(") ->")]

    def by_name(args: Sequence[Any]) -> dict[str, Any]:
        return {**defaults, **dict(zip(defaults, args, strict=False))}  # torch leaves out what is a default, at the end

    def forward(*args: Any) -> Any:
        return function(**by_name(args))

    def gradients(grads: list[Tensor], *args: Any) -> list[Tensor]:
        """Of every tensor of floats."""
        given = by_name(args)
        leaves = {name: t.detach().requires_grad_() for name, t in given.items() if _differentiable(t)}
        with _recorded():
            made = function(**{**given, **leaves})
            outputs = [made] if isinstance(made, Tensor) else list(made)
            found = torch.autograd.grad(outputs, list(leaves.values()), grads, materialize_grads=True)
        return [g.clone() for g in found]  # none may be another's memory

    op = torch.library.custom_op(name, forward, mutates_args=(), schema=schema)
    backward = torch.library.custom_op(f"{name}_backward", gradients, mutates_args=(), schema=f"(Tensor[] grads, {arguments}) -> Tensor[]")
    op.register_fake(lambda *args: shapes(**by_name(args)))
    backward.register_fake(lambda grads, *args: [torch.empty_like(t) for t in args if _differentiable(t)])

    def keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)))
        ctx.settings = [None if isinstance(each, Tensor) else (each,) for each in inputs]

    def back(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = iter(ctx.saved_tensors)
        args = [next(kept) if each is None else each[0] for each in ctx.settings]
        found = iter(backward([g.contiguous() for g in grads], *args))
        return tuple(next(found) if _differentiable(each) else None for each in args)

    op.register_autograd(back, setup_context=keep)
    return op


@contextmanager
def _recorded() -> Iterator[None]:
    """Operations are recorded for gradients, as they are not inside an operation of torch.library."""
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        for key in (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
