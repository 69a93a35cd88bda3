"""launch: the command line that starts an attempt's ranks on a node. Standard library alone: it runs inside jobs, from the snapshot."""

from __future__ import annotations

import re
import socket

from launch.slurm import SlurmError, call
from launch.supervise.place import Attempt


def agent_command(attempt: Attempt, *, head: str, port: int, node_rank: int | None) -> list[str]:
    """What runs once on each node: torchrun with static rendezvous at head:port, or the rank itself where the job takes no torchrun.

    With node_rank None torchrun takes its node's number from the environment variable PET_NODE_RANK.
    """
    job = attempt.job
    rank = ["-m", "launch.rank", str(attempt.folder), "--", job.python, *attempt.item.arguments]
    if not job.torchrun:
        return [job.python, *rank]
    numa = (job.profile.get("nodes") or {}).get("numa") or "none"
    number = [] if node_rank is None else [f"--node-rank={node_rank}"]
    binding = [] if numa == "none" else [f"--numa-binding={numa}"]
    return [
        *(job.python, "-m", "torch.distributed.run"),
        *(f"--nnodes={len(attempt.nodes)}", *number, f"--nproc-per-node={job.processes_per_node}"),
        *("--rdzv-backend=static", f"--master-addr={address(head)}", f"--master-port={port}", "--max-restarts=0", *binding),
        *("--no-python", job.python, *rank),
    ]


def address(node: str) -> str:
    """A node's name, or, where that does not resolve here, the address by which Slurm reaches it, if it knows one."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        try:
            found = re.search(r"\bNodeAddr=(\S+)", call("scontrol", "show", "node", node))
        except SlurmError:
            return node
        return found[1] if found else node
    return node
