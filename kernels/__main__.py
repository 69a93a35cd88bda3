"""`python -m kernels`: list the operations, their implementations, the one that this machine would
run, and the reasons against faster ones.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fem_common.cli import Parser, run
from fem_common.errors import UserError

if TYPE_CHECKING:
    import torch

    from kernels.implementations import Op


def lines(ops: dict[str, Op], device: torch.device) -> list[str]:
    """Return the lines of the list: a paragraph for each operation, implementations from the
    fastest on, and an arrow before the one that runs.
    """
    from kernels.implementations import overrides

    width = max(len(each.name) for op in ops.values() for each in op.implementations)
    found = []
    for op in ops.values():
        runs, reasons = op.automatic(device)
        forced = f" (FEM_KERNELS asks for {overrides()[op.name]})" if op.name in overrides() else ""
        found += ["", f"{op.name}: {op.what}{forced}"]
        for each in op.implementations:
            reason = reasons.get(each.name, "" if each.automatic else "only if requested")
            arrow = "->" if each.name == runs else "  "
            note = f" [{reason}]" if reason else ""
            found.append(f"  {arrow} {each.name:{width}}  {each.what}{note}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the list. Return exit code 2 if FEM_KERNELS is invalid."""
    Parser(prog="python -m kernels", description=__doc__).parse_args(argv)
    return run("kernels", _list)


def _list() -> int:
    import torch  # takes seconds: not for --help

    from kernels import machine
    from kernels.implementations import check_overrides, operations, triton_version

    ops, device = operations(), machine.device()
    try:
        check_overrides()
    except ValueError as error:
        raise UserError(str(error)) from None
    triton = triton_version()
    architecture = f" (sm_{machine.architecture(device)})" if device.type == "cuda" else ""
    print(
        f"device: {machine.name(device)}{architecture}; torch {torch.__version__};"
        f" triton {'.'.join(map(str, triton)) if triton else 'not installed'}"
    )
    print(
        "-> used here for calls of ordinary shapes; other calls use the next implementation, with "
        "one warning"
    )
    print("\n".join(lines(ops, device)))
    print("\nforce one: FEM_KERNELS=operation=implementation,... in the environment")
    return 0


if __name__ == "__main__":
    sys.exit(main())
