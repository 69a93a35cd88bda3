"""Registration of operations with torch.library, for torch.compile and for fake tensors: a name,
arguments, the shapes of results.

Outside torch.compile and fake tensors, the public function is called directly. Inside,
``fem::<operation>`` is one node of the graph, which chooses its implementation when it runs, may
read values, and launches any kernel. Its backward, ``fem::<operation>_backward``, recomputes the
forward, because a node stores its arguments alone.
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

from kernels.arguments import is_dynamic, without_autocast

F = TypeVar("F", bound=Callable[..., Any])
# torch.compile of torch 2.11 gives an autograd.Function zero or other wrong gradients, silently, if
# its forward changes a tensor in place and returns it (pytorch issue 180642).
_WRONG_GRADIENTS = torch.__version__.startswith("2.11.")


def _namespace() -> str:
    """Return "fem", or an unused name if this file is a copy, as in an exported model: registering
    an operation again frees the first.
    """
    if __name__ == "kernels.registered":
        return "fem"
    taken = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
    return next(name for name in map("fem_copy{}".format, itertools.count(1)) if name not in taken)


NAMESPACE = _namespace()


def registered(
    shapes: Callable[..., Any],
    traceable: Callable[..., bool] = lambda *_, **__: True,
    name: str | None = None,
    *,
    any_size: bool = False,
    kernels: bool = True,
) -> Callable[[F], F]:
    """Decorate an annotated function of tensors and settings as an operation of torch.library with
    its name, or with ``name``.

    shapes: called like the function, returns empty tensors with the shapes of its results.
    traceable: called like the function, returns True if torch.compile can trace the CPU's steps for
    this call and fuse them with their surroundings; kernels that run on a GPU cannot be traced.
    any_size: the steps on a CPU are the same for all sizes, so that torch.export can trace them
    with dynamic sizes; otherwise the function is one node on a CPU. kernels False: the function
    calls other operations, and is one node on a CPU only.
    """

    def decorate(function: F) -> F:
        defaults = {
            name: each.default for name, each in inspect.signature(function).parameters.items()
        }
        names, op = (
            list(defaults),
            _operation(function, name or function.__name__, defaults, shapes),
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else kwargs[names[0]]
            dynamic = not any_size and is_dynamic(*args, *kwargs.values())
            if dynamic or (kernels and opaque(first, lambda: traceable(*args, **kwargs))):
                given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
                return op(*(given[name] for name in names))
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate


def opaque(first: Tensor, traceable: Callable[[], bool] = lambda: True) -> bool:
    """Return True if a call with this tensor must be one node of a graph: a fake tensor, or a call
    that torch.compile cannot trace, or would trace to wrong gradients.
    """
    if not torch.compiler.is_compiling():
        return isinstance(first, FakeTensor)
    wrong = _WRONG_GRADIENTS and torch.is_grad_enabled()
    return first.is_cuda or wrong or not traceable()


def _operation(
    function: Callable[..., Any], name: str, defaults: dict[str, Any], shapes: Callable[..., Any]
) -> Callable[..., Any]:
    """Register ``fem::<name>``, whose arguments are all positional, and its backward."""
    name, schema = (
        f"{NAMESPACE}::{name}",
        torch.library.infer_schema(function, mutates_args=()).replace("*, ", ""),
    )
    arguments = schema[1 : schema.rindex(") ->")]

    def by_name(args: Sequence[Any]) -> dict[str, Any]:
        return {
            **defaults,
            **dict(zip(defaults, args, strict=False)),
        }  # torch omits trailing arguments that have their defaults

    def forward(*args: Any) -> Any:
        made = function(**by_name(args))
        return (
            _own(made, args)
            if isinstance(made, Tensor)
            else type(made)(_own(t, [*args, *made[:n]]) for n, t in enumerate(made))
        )

    @without_autocast
    def gradients(grads: list[Tensor], *args: Any) -> list[Tensor]:
        """Return the gradient of every floating-point tensor."""
        given = by_name(args)
        leaves = {
            name: t.detach().requires_grad_() for name, t in given.items() if _differentiable(t)
        }
        with _recorded():
            made = function(**{**given, **leaves})
            outputs = [made] if isinstance(made, Tensor) else list(made)
            kept = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
            outputs, given_grads = [t for t, _ in kept], [g for _, g in kept]
            found = torch.autograd.grad(
                outputs, list(leaves.values()), given_grads, materialize_grads=True
            )
        return [
            torch.empty_like(t).copy_(g) for t, g in zip(leaves.values(), found, strict=True)
        ]  # no two share memory

    op = torch.library.custom_op(name, forward, mutates_args=(), schema=schema)
    backward = torch.library.custom_op(
        f"{name}_backward",
        gradients,
        mutates_args=(),
        schema=f"(Tensor[] grads, {arguments}) -> Tensor[]",
    )
    op.register_fake(lambda *args: shapes(**by_name(args)))
    backward.register_fake(
        lambda grads, *args: [torch.empty_like(t) for t in args if _differentiable(t)]
    )

    def keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)))
        ctx.settings = [None if isinstance(each, Tensor) else (each,) for each in inputs]

    def back(ctx: Any, *grads: Tensor | Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        kept = iter(ctx.saved_tensors)
        args = [next(kept) if each is None else each[0] for each in ctx.settings]
        flat = [g for each in grads for g in ([each] if isinstance(each, Tensor) else each)]
        found = iter(backward([g.contiguous() for g in flat], *args))
        return tuple(next(found) if _differentiable(each) else None for each in args)

    op.register_autograd(back, setup_context=keep)
    return op


def _own(t: Tensor, others: Sequence[Any]) -> Tensor:
    """Return t with the layout of its shape function, contiguous, starting at its own memory's
    start, as torch.library requires of results.
    """
    shared = {each.untyped_storage().data_ptr() for each in others if isinstance(each, Tensor)}
    fits = (
        t.is_contiguous()
        and t.storage_offset() == 0
        and t.untyped_storage().data_ptr() not in shared
    )
    return t if fits else t.clone(memory_format=torch.contiguous_format)


@contextmanager
def _recorded() -> Iterator[None]:
    """Record operations for gradients, which is off inside an operation of torch.library."""
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        for key in (
            DispatchKey.AutogradFunctionality,
            DispatchKey.AutogradOther,
            DispatchKey.ADInplaceOrView,
        ):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
