"""``python -m launch.node.measure ...``: measure devices and networks. The only file of this
package that imports torch.

all-reduce FOLDER   under torchrun, for `launch.cluster.trial`. Every rank all-reduces tensors over
                    NCCL (GPUs) or gloo (CPUs). The nodes' clocks are compared. Every node writes
                    into the shared folders and checks that it sees the other nodes' files. Rank 0
                    writes the results to FOLDER/bandwidth.json.
product DEVICE      on a node, for `launch.node.checks`: compute one matrix product whose result is
                    known, and measure the device's speed.

For an all-reduce of S bytes in t seconds over n ranks, the algorithm bandwidth is S/t, and the bus
bandwidth is S/t * 2(n-1)/n: the traffic through each rank's link. It does not depend on n, so it
can be compared with the hardware's speed. Floors are bus bandwidths.
"""

from __future__ import annotations

import argparse
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

from launch.job import read_json, write_json
from launch.node.checks import node_name

MIB = 1 << 20
SIZES = {"nccl": (1, 32, 1024), "gloo": (1, 16)}  # MiB; the last one is compared with the floor
SECONDS_A_SIZE = 1.0
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

    @property
    def names(self) -> list[str]:
        """Names of the nodes, without repetition, in the order of their ranks."""
        return list(dict.fromkeys(self.nodes))


def join(backend: str, seconds: float) -> Ranks:
    """Connect this rank to the process group, and return its identity. ``seconds`` is the limit.

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
        backend, timeout=timedelta(seconds=seconds), device_id=device if backend == "nccl" else None
    )
    nodes: list[Any] = [None] * world_size
    dist.all_gather_object(nodes, node_name())
    return Ranks(rank, world_size, local_rank, backend, device, tuple(nodes))


def measure(ranks: Ranks, mib: int, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Measure the bandwidth of all-reducing a float32 tensor of ``mib`` MiB, for about a second.

    group: ranks that take part; None: all ranks. Return {"mib", "milliseconds", "algorithm",
    "bus"}, with the time per all-reduce, and bandwidths in GB/s (see the module docstring).

    Raises:
        RuntimeError: the sum is wrong.
    """
    size = dist.get_world_size(group)
    data = torch.full((mib * MIB // 4,), float(dist.get_rank(group) + 1), device=ranks.device)
    dist.all_reduce(data, group=group)
    if (data != size * (size + 1) / 2).any().item():
        raise RuntimeError(
            f"an all-reduce of {mib} MiB gave a wrong sum on {ranks.nodes[ranks.rank]}"
        )
    data.zero_()

    def run(times: int) -> float:
        """Return the seconds that the slowest rank needs for ``times`` all-reduces."""
        meet(ranks, group)
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(data, group=group)
        data[0].item()
        took = torch.tensor([time.perf_counter() - began], device=ranks.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
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


def meet(ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of the group have called this function (a barrier)."""
    here = torch.zeros(1, device=ranks.device)
    dist.all_reduce(here, group=group)
    here.item()


def neighbours(ranks: Ranks, mib: int) -> list[dict[str, Any]]:
    """Measure every pair of neighbouring nodes, and return {"nodes", "bus"} for each pair.

    "bus" is the bus bandwidth in GB/s. A slow node is part of both of the slowest pairs. All ranks
    must call the function together.
    """
    names = ranks.names
    pairs = [(names[i], names[(i + 1) % len(names)]) for i in range(len(names))]
    members = [[rank for rank, node in enumerate(ranks.nodes) if node in pair] for pair in pairs]
    groups = [dist.new_group(list(ranks_of)) for ranks_of in members]
    found: dict[int, float] = {}
    rounds = [
        range(0, len(pairs) - 1, 2),
        range(1, len(pairs), 2),
        *([range(len(pairs) - 1, len(pairs))] if len(pairs) % 2 else []),
    ]
    for chosen in rounds:
        meet(ranks)
        for i in chosen:
            if ranks.rank in members[i]:
                found[i] = measure(ranks, mib, groups[i])["bus"]
    told = gather(ranks, found)
    return [
        {"nodes": list(pair), "bus": min(answer[i] for answer in told if i in answer)}
        for i, pair in enumerate(pairs)
    ]


def gather(ranks: Ranks, value: Any) -> list[Any]:
    """Return the list of the values of all ranks. All ranks must call the function together."""
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, value)
    return values


def clocks(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Compare the nodes' clocks. All ranks must call the function together.

    Return {"skew": {node: seconds that its clock is ahead of rank 0's}, "ahead_at_most": seconds
    that rank 0's clock is ahead of the submitting host's, at most}.

    The submitting host writes its time to FOLDER/clock.json. The value that is read is older by the
    file system's delay, so the second value is an upper bound. It is None without that file.
    """
    offsets: dict[str, float] = {}
    for _ in range(3):
        meet(ranks)
        now = gather(ranks, time.time())
        for node, then in zip(ranks.nodes, now, strict=True):
            offset = then - now[0]
            offsets[node] = min(offset, offsets.get(node, offset), key=abs)
    told = read_json(folder / "clock.json")
    ahead = time.time() - float(told["time"]) if told else None
    return {
        "skew": {node: round(offset, 4) for node, offset in offsets.items()},
        "ahead_at_most": ahead,
    }


def exchange(ranks: Ranks, folders: Sequence[str], token: str) -> list[str]:
    """Check that each node sees the files that other nodes write into the folders.

    Every node writes a file into each folder, and waits for the other nodes' files. Return an error
    text for each file that cannot be written or is not seen. token: text in the names of the files.
    All ranks must call the function together.
    """
    mine = ranks.local_rank == 0 or ranks.nodes.index(ranks.nodes[ranks.rank]) == ranks.rank
    node, faults = ranks.nodes[ranks.rank], []
    paths = {
        name: {other: Path(name) / f".launch_doctor_{token}_{other}" for other in ranks.names}
        for name in folders
    }
    for name in folders if mine else ():
        try:
            paths[name][node].write_text(node, encoding="utf-8")
        except OSError as error:
            faults.append(f"{name}: {node} cannot write to it: {error.strerror}")
    meet(ranks)
    for name in folders if mine else ():
        deadline = time.monotonic() + SEEN_SECONDS
        others = {other: path for other, path in paths[name].items() if other != node}
        while (
            unseen := [other for other, path in others.items() if not path.exists()]
        ) and time.monotonic() < deadline:
            time.sleep(0.5)
        if unseen:
            faults.append(
                f"{name}: {node} does not see the files of {', '.join(unseen)}: the nodes do not "
                "share this folder"
            )
    everyone = gather(ranks, faults)
    for name in folders if mine else ():
        paths[name][node].unlink(missing_ok=True)
    return list(dict.fromkeys(fault for told in everyone for fault in told))


def all_reduce(argv: list[str]) -> int:
    """Run all measurements. Rank 0 writes FOLDER/bandwidth.json. Return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.node.measure all-reduce", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="folder for bandwidth.json")
    parser.add_argument("--backend", choices=SIZES, required=True)
    parser.add_argument(
        "--floor",
        type=float,
        help="bus bandwidth in GB/s below which pairs of nodes are measured, too",
    )
    parser.add_argument(
        "--shared",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder that all nodes should share",
    )
    parser.add_argument(
        "--seconds", type=float, default=120, help="for the ranks to find each other"
    )
    arguments = parser.parse_args(argv)
    ranks = join(arguments.backend, arguments.seconds)
    result: dict[str, Any] = {
        "world_size": ranks.world_size,
        "nodes": ranks.names,
        "backend": ranks.backend,
    }
    result["clocks"] = clocks(ranks, arguments.folder)
    result["shared"] = exchange(ranks, arguments.shared, f"{os.environ.get('MASTER_PORT', '0')}")
    if ranks.world_size > 1:
        result["sizes"] = [measure(ranks, mib) for mib in SIZES[ranks.backend]]
        slow = arguments.floor is not None and result["sizes"][-1]["bus"] < arguments.floor
        if gather(ranks, slow)[0] and len(ranks.names) > 2:
            result["pairs"] = neighbours(ranks, SIZES[ranks.backend][-1])
    result["clocks"]["written"] = time.time()
    if ranks.rank == 0:
        write_json(arguments.folder / "bandwidth.json", result)
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
    return all_reduce(words) if what == "all-reduce" else product(*words)


if __name__ == "__main__":
    sys.exit(main())
