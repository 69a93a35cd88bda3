"""``python -m launch.node.measure ...``: measure devices and networks. The only file of this
package that imports torch.

all-reduce FOLDER BACKEND SHARED...
                    under torchrun, for `launch.cluster.trial`. Every rank all-reduces tensors over
                    NCCL (GPUs) or gloo (CPUs). The nodes' clocks are compared. Every node checks
                    that it sees what the first node writes into the shared folders. Rank 0 writes
                    the results to FOLDER/bandwidth.json.
product DEVICE      on a node, for `launch.node.checks`: compute one matrix product whose result is
                    known, and measure the device's speed.

For an all-reduce of S bytes in t seconds over n ranks, the algorithm bandwidth is S/t, and the bus
bandwidth is S/t * 2(n-1)/n: the traffic through each rank's link. It does not depend on n, so it
can be compared with the hardware's speed. Floors are bus bandwidths.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.job import write_json
from launch.node.checks import node_name

MIB = 1 << 20
SIZES = {"nccl": (1, 32, 1024), "gloo": (1, 16)}  # MiB; the last one is compared with the floor
SECONDS_A_SIZE = 1.0
CLOCK_SAMPLES = 3
JOIN_SECONDS = 120.0  # for the ranks to find each other
# until a file is seen from another node: network file systems cache folder listings
SEEN_SECONDS = 15.0


@dataclass(frozen=True)
class Ranks:
    """This rank's identity and the nodes of all ranks."""

    rank: int
    world_size: int
    local_rank: int
    backend: str
    device: torch.device
    nodes: tuple[str, ...]  # each rank's node


def join(backend: str) -> Ranks:
    """Connect this rank to the process group within `JOIN_SECONDS`, and return its identity.

    On GPUs, the rank sees only its own device.

    Raises:
        RuntimeError: the ranks do not connect in time.
    """
    rank, world_size, local_rank = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    if backend == "nccl":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
            map(str, range(int(os.environ["LOCAL_WORLD_SIZE"])))
        )
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank]
    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=JOIN_SECONDS),
        device_id=device if backend == "nccl" else None,
    )
    nodes: list[Any] = [None] * world_size
    dist.all_gather_object(nodes, node_name())
    return Ranks(rank, world_size, local_rank, backend, device, tuple(nodes))


def measure(ranks: Ranks, mib: int) -> dict[str, float]:
    """Measure the bandwidth of all-reducing a float32 tensor of ``mib`` MiB, for about a second.

    Return {"mib", "milliseconds", "algorithm", "bus"}, with the time per all-reduce, and bandwidths
    in GB/s (see the module docstring).

    Raises:
        RuntimeError: the sum is wrong.
    """
    size = ranks.world_size
    data = torch.full((mib * MIB // 4,), float(ranks.rank + 1), device=ranks.device)
    dist.all_reduce(data)
    if (data != size * (size + 1) / 2).any().item():
        raise RuntimeError(
            f"an all-reduce of {mib} MiB gave a wrong sum on {ranks.nodes[ranks.rank]}"
        )
    data.zero_()

    def run(times: int) -> float:
        """Return the seconds that the slowest rank needs for ``times`` all-reduces."""
        meet(ranks)
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(data)
        data[0].item()
        took = torch.tensor([time.perf_counter() - began], device=ranks.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took.item())

    times = max(2, min(50, int(SECONDS_A_SIZE / max(run(1), 1e-6))))
    seconds = run(times) / times
    algorithm = mib * MIB / seconds / 1e9
    return {
        "mib": mib,
        "milliseconds": round(seconds * 1e3, 3),
        "algorithm": round(algorithm, 3),
        "bus": round(algorithm * 2 * (size - 1) / size, 3),
    }


def meet(ranks: Ranks) -> None:
    """Wait until all ranks have called this function (a barrier)."""
    here = torch.zeros(1, device=ranks.device)
    dist.all_reduce(here)
    here.item()


def gather(ranks: Ranks, value: Any) -> list[Any]:
    """Return the list of the values of all ranks. All ranks must call the function together."""
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, value)
    return values


def clock_offsets(ranks: Ranks) -> dict[str, float]:
    """Return node -> seconds that its clock is ahead of that of the first node.

    A busy rank reads its clock late, so that each offset is the smallest of `CLOCK_SAMPLES`. All
    ranks must call the function together.
    """
    samples = [gather(ranks, time.time()) for _ in range(CLOCK_SAMPLES)]
    return {
        node: min((sample[rank] - sample[0] for sample in samples), key=abs)
        for rank, node in enumerate(ranks.nodes)
    }


def unshared(ranks: Ranks, folders: Sequence[str], name: str) -> list[str]:
    """Check that every node sees a file that rank 0 writes into each folder.

    Return an error text for each node and folder without the file. name: the file's name. All ranks
    must call the function together.
    """
    files = [Path(folder) / name for folder in folders]
    if ranks.rank == 0:
        for file in files:
            file.touch()
    meet(ranks)
    deadline = time.monotonic() + SEEN_SECONDS
    while unseen := [str(file.parent) for file in files if not file.exists()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    everyone = gather(ranks, unseen)
    if ranks.rank == 0:
        for file in files:
            file.unlink()
    faults = [
        f"{folder}: {node} does not see what {ranks.nodes[0]} writes into it: the nodes do not "
        "share this folder"
        for node, missing in zip(ranks.nodes, everyone, strict=True)
        for folder in missing
    ]
    return list(dict.fromkeys(faults))


def all_reduce(folder: str, backend: str, *shared: str) -> int:
    """Run all measurements. Rank 0 writes FOLDER/bandwidth.json. Return 0."""
    ranks = join(backend)
    meet(ranks)
    result: dict[str, Any] = {
        "world_size": ranks.world_size,
        "backend": ranks.backend,
        "clocks": clock_offsets(ranks),
        "shared": unshared(ranks, shared, f".{Path(folder).name}"),
    }
    if ranks.world_size > 1:
        result["sizes"] = [measure(ranks, mib) for mib in SIZES[ranks.backend]]
    if ranks.rank == 0:
        write_json(Path(folder) / "bandwidth.json", result)
    meet(ranks)
    dist.destroy_process_group()
    return 0


# Size of the product that is compared. Its inner size is half of it: sums of +1, 0, -1 that
# bfloat16 represents exactly.
SIZE = 2048
TIMED = 8192  # size of the products that are timed, on a GPU


def check(
    device_name: str, size: int = SIZE, timed: int = TIMED, repeats: int = 20
) -> dict[str, object]:
    """Compute a matrix product with a known result on a device, and measure the device's speed.

    device_name: for example cuda:0 or cpu. size: rows and columns of the checked product. timed:
    rows and columns of the timed products. repeats: number of timed products.

    Return {"wrong": number of entries that differ from the CPU's exact result, "tflops": speed in
    bfloat16, in TFLOP/s}.

    Raises:
        RuntimeError: the device fails.
    """
    device = torch.device(device_name)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-1, 2, shape, generator=generator).float()
        for shape in ((size, size // 2), (size // 2, size))
    )
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


def product(device: str) -> int:
    """Print the result of `check`, or {"error": text}, as a line of JSON.

    Return 0, or 1 if the device failed or its result is wrong.
    """
    try:
        result = check(device) if device != "cpu" else check(device, size=512, timed=256, repeats=2)
    except (
        ImportError,
        RuntimeError,
        AssertionError,
        OSError,
    ) as error:
        # torch without CUDA raises AssertionError.
        result = {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
    print(json.dumps(result), flush=True)
    return 1 if result.get("error") or result.get("wrong") else 0


def main(argv: list[str] | None = None) -> int:
    """Run the requested measurement and return its exit code."""
    what, *words = sys.argv[1:] if argv is None else argv
    return all_reduce(*words) if what == "all-reduce" else product(*words)


if __name__ == "__main__":
    sys.exit(main())
