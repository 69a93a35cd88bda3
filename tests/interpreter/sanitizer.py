"""Sanitizer for Triton's interpreter: finds addresses that are wrong on a GPU.

A GPU runs programs at the same time and in any order. The sanitizer runs them in a shuffled order
and reports a fault if
- a load or a store uses an address that is not an element of the tensor that its pointer was made
  from, or is not aligned to one;
- one store uses an address twice, or two programs store to the same address;
- a program loads what another program of the launch stores;
- what is stored through one argument is loaded through another;
- the sum, difference, or product of int32 numbers overflows;
- the grid's second or third side is over 65535.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Builder methods that make pointers from pointers: the result points into the same argument.
KEEPS = ("addptr", "splat", "broadcast", "expand_dims", "reshape", "bitcast", "trans")


class Launch:
    """One launch of a kernel: its arguments' elements, and each program's loads and stores."""

    def __init__(self, kernel: str, tensors: dict[str, torch.Tensor]) -> None:
        self.kernel, self.tensors = kernel, tensors
        self.elements: dict[str, Any] = {}
        self.faults: set[str] = set()
        # Argument -> index of a program -> addresses.
        self.stored: dict[str, dict[int, Any]] = {}
        self.loaded: dict[str, dict[int, Any]] = {}
        self.program, self.order = 0, np.arange(1)

    def argument(self, handle: Any) -> str:
        """Return the name of the argument that the pointers of a handle were made from.

        A handle without this attribute gets the argument that starts at its first address, or "".
        """
        known = handle.attr.get("argument")
        if known is None:
            first = int(handle.data.flat[0])
            known = next((name for name, t in self.tensors.items() if t.data_ptr() == first), "")
            handle.set_attr("argument", known)
        return str(known)

    def touch(self, handle: Any, mask: Any, what: str) -> None:
        """Record a load or a store at the handle's pointers where ``mask`` is True.

        Addresses outside the argument and repeated addresses of a store are faults. what: "load" or
        "store".
        """
        shape = np.broadcast_shapes(handle.data.shape, mask.shape)
        addresses = np.broadcast_to(handle.data, shape)[
            np.broadcast_to(mask, shape).astype(bool)
        ].astype(np.int64)
        if not addresses.size:
            return
        name = self.argument(handle)
        unique = np.unique(addresses)
        if not np.isin(unique, self._elements(name)).all():
            self.faults.add(f"{what} outside of {name or 'all arguments'}")
        if what == "store" and len(unique) != len(addresses):
            self.faults.add(f"one store names an address of {name} twice")
        side = self.stored if what == "store" else self.loaded
        mine = side.setdefault(name, {})
        if self.program in mine:
            unique = np.union1d(mine[self.program], unique)
        mine[self.program] = unique

    def _elements(self, name: str) -> Any:
        """Return the sorted addresses of an argument's elements."""
        if name not in self.elements:
            start = self.tensors[name].data_ptr() if name else None
            # Arguments that start at the same address count as one.
            found = [_addresses(t) for t in self.tensors.values() if t.data_ptr() == start]
            self.elements[name] = np.unique(np.concatenate([np.empty(0, np.int64), *found]))
        return self.elements[name]

    def judge(self) -> None:
        """Record conflicts between programs and between arguments, after all programs have run."""
        for name, programs in self.stored.items():
            written = np.concatenate(list(programs.values()))
            owners = np.repeat(list(programs), [len(each) for each in programs.values()])
            order = np.argsort(written, kind="stable")
            written, owners = written[order], owners[order]
            if (written[1:] == written[:-1]).any():
                self.faults.add(f"two programs store to one address of {name}")
            for other, readers in self.loaded.items():
                for program, read in readers.items():
                    at = np.minimum(np.searchsorted(written, read), len(written) - 1)
                    same = written[at] == read
                    if same.any() and other != name:
                        self.faults.add(f"{other} is loaded where {name} is stored")
                    elif (same & (owners[at] != program)).any():
                        self.faults.add(f"a program loads what another stores to {name}")


def _addresses(t: torch.Tensor) -> Any:
    """Return the address of each element."""
    found = np.full((1,) * t.dim(), t.data_ptr(), np.int64)
    for n, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        offsets = np.arange(size) * stride * t.element_size()
        found = found + offsets.reshape([-1 if m == n else 1 for m in range(t.dim())])
    return found.ravel()


class Sanitizer:
    """Collector of faults ("kernel: fault") and of the number of launches of each kernel."""

    def __init__(self, seed: int = 0) -> None:
        self.faults: set[str] = set()
        self.launches: dict[str, int] = {}
        self._random = random.Random(seed)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Patch the interpreter with the sanitizer's methods within the context."""
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

        made = (
            self._memory()
            | self._order()
            | self._integers()
            | {f"create_{name}": self._keeping(f"create_{name}") for name in KEEPS}
        )
        before = {name: getattr(InterpreterBuilder, name) for name in made}
        call = GridExecutor.__call__
        for name, method in made.items():
            setattr(InterpreterBuilder, name, method)
        GridExecutor.__call__ = self._launching(call)
        try:
            yield
        finally:
            GridExecutor.__call__ = call
            for name, method in before.items():
                setattr(InterpreterBuilder, name, method)

    def _launching(self, call: Any) -> Any:
        """Wrap GridExecutor.__call__ to create a Launch and to collect its faults."""

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            given = dict(zip(executor.arg_names, args, strict=False)) | kwargs
            name = f"{executor.fn.__module__}: {executor.fn.__name__.lstrip('_')}"
            self.now = Launch(
                name, {key: t for key, t in given.items() if isinstance(t, torch.Tensor)}
            )
            self.launches[name] = self.launches.get(name, 0) + 1
            call(executor, *args, **kwargs)
            self.now.judge()
            self.faults |= {f"{name}: {fault}" for fault in self.now.faults}

        return launch

    def _memory(self) -> dict[str, Any]:
        """Return loads and stores that record their addresses."""
        from triton.runtime.interpreter import InterpreterBuilder

        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def create_masked_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self.now.touch(pointers, mask.data, "load")
            return load(builder, pointers, mask, *rest)

        def create_masked_store(
            builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any
        ) -> Any:
            self.now.touch(pointers, mask.data, "store")
            return store(builder, pointers, value, mask, *rest)

        return {
            "create_masked_load": create_masked_load,
            "create_masked_store": create_masked_store,
        }

    def _order(self) -> dict[str, Any]:
        """Return grid methods that run programs in a shuffled order and check the grid's sides."""
        from triton.runtime.interpreter import InterpreterBuilder

        place, measure = InterpreterBuilder.set_grid_idx, InterpreterBuilder.set_grid_dim

        def set_grid_dim(builder: Any, *sides: int) -> None:
            if max(sides[1:]) > 65535:
                self.now.faults.add(f"the grid {sides}")
            order = list(range(int(np.prod(sides))))
            self._random.shuffle(order)
            self.now.order = np.array(order)
            measure(builder, *sides)

        def set_grid_idx(builder: Any, *at: int) -> None:
            sides = builder.grid_dim
            self.now.program = int(self.now.order[np.ravel_multi_index(at, sides)])
            place(builder, *(int(n) for n in np.unravel_index(self.now.program, sides)))

        return {"set_grid_dim": set_grid_dim, "set_grid_idx": set_grid_idx}

    def _integers(self) -> dict[str, Any]:
        """Return sums, differences, and products that record an int32 overflow."""

        def checked(operation: Any) -> Any:
            def create(builder: Any, left: Any, right: Any) -> Any:
                if left.data.dtype == np.int32 and right.data.dtype == np.int32:
                    wide = operation(left.data.astype(np.int64), right.data.astype(np.int64))
                    if (wide != wide.astype(np.int32)).any():
                        self.now.faults.add(f"int32 overflow: {wide.flat[np.abs(wide).argmax()]}")
                return builder.binary_op(left, right, operation)

            return create

        return {
            "create_mul": checked(np.multiply),
            "create_add": checked(np.add),
            "create_sub": checked(np.subtract),
        }

    def _keeping(self, name: str) -> Any:
        """Return a builder method that passes a pointer's argument name on to its result."""
        from triton.runtime.interpreter import InterpreterBuilder

        own, typed = getattr(InterpreterBuilder, name), name == "create_splat"

        def create(builder: Any, *given: Any) -> Any:
            made = own(builder, *given)
            source = given[1 if typed else 0]
            if source.data.dtype == np.uint64 and made.data.dtype == np.uint64 and source.data.size:
                made.set_attr("argument", self.now.argument(source))
            return made

        return create
