"""launch: ``python -m launch.matmul DEVICE``: one matrix product whose answer is known, and how fast the device is at it.

Runs in the ranks' interpreter, on a node, for `launch.node_check`; the only file here beside `bandwidth` that imports torch.
"""

from __future__ import annotations

import json
import sys
import time

SIZE = 2048  # of the product that is compared; its inner size is half of it: sums of +1, 0, -1 that bfloat16 holds exactly
TIMED = 8192  # of the products that are timed, on a GPU


def check(device_name: str, size: int = SIZE, timed: int = TIMED, repeats: int = 20) -> dict[str, object]:
    """{"wrong": entries that differ from the CPU's exact answer, "tflops": speed in bfloat16} of a device such as cuda:0 or cpu.

    Raises:
        RuntimeError: the device fails.
    """
    import torch

    device = torch.device(device_name)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, shape, generator=generator).float() for shape in ((size, size // 2), (size // 2, size)))
    answer = (left.to(device, torch.bfloat16) @ right.to(device, torch.bfloat16)).float().cpu()
    wrong = int((answer != left @ right).sum())
    matrix = torch.ones(timed, timed, dtype=torch.bfloat16, device=device)
    (matrix @ matrix)[0, 0].item()
    began = time.perf_counter()
    for _ in range(repeats):
        product = matrix @ matrix
    product[0, 0].item()
    seconds = time.perf_counter() - began
    return {"wrong": wrong, "tflops": round(2 * timed**3 * repeats / seconds / 1e12, 3)}


def main(argv: list[str] | None = None) -> int:
    """Print the result, or the error, as a line of JSON: 0, 1 where the device failed or its answer is wrong."""
    device = (sys.argv[1:] if argv is None else argv)[0]
    try:
        result = check(device) if device != "cpu" else check(device, size=512, timed=256, repeats=2)
    except (ImportError, RuntimeError, AssertionError, OSError) as error:  # AssertionError: a torch without CUDA
        result = {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
    print(json.dumps(result), flush=True)
    return 1 if result.get("error") or result.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
