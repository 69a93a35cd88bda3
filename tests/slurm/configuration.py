"""Configuration files of a MiniSlurm's daemons: slurm.conf, node.conf, gres.conf, hosts, munge.key,
devices.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

SLURM = """\
ClusterName=mini
SlurmctldHost=control(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for cred_expire, which is 120 s otherwise.
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobcomp.txt
AccountingStorageType=accounting_storage/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
MailProg=/bin/true
CommunicationParameters=NoCtldInAddrAny
DebugFlags=NO_CONF_HASH
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal,enable_configless
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={shape.slurmd_timeout}
KillWait=5
MessageTimeout={message_timeout}
MinJobAge=3600
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 DefMemPerCPU=100 GraceTime={shape.grace_seconds}
PartitionName=urgent Nodes=ALL PriorityTier=100 PreemptMode=OFF DefMemPerCPU=100
"""  # noqa: E501
# The nodes, and srun on the nodes, listen only on the loopback address. srun on other hosts uses
# slurm.conf and is called back on any address.
SLURMD = """\
Include {root}/etc/slurm.conf
CommunicationParameters=NoInAddrAny
"""


@dataclass(frozen=True)
class Shape:
    """Configured resources of each node, and times of the partitions."""

    cpus: int
    gpus: int
    memory_mb: int
    grace_seconds: int
    slurmd_timeout: int
    gpu_types: tuple[str, ...]  # those of each node; empty for none


def write(root: Path, nodes: tuple[str, ...], shape: Shape, ports: list[int]) -> None:
    """Write all files; ``ports``: slurmctld's, then one for each node."""
    types = shape.gpu_types or ("",) * len(nodes)
    lines = []
    for name, port, kind in zip(nodes, ports[1:], types, strict=True):
        line = f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={shape.cpus}"
        line += f" RealMemory={shape.memory_mb}"
        if shape.gpus:
            line += f" Gres=gpu:{kind}:{shape.gpus}" if kind else f" Gres=gpu:{shape.gpus}"
        lines.append(line)
    etc = root / "etc"
    # A node becomes DOWN after slurmd_timeout and two messages without a timely answer.
    patience = max(5, min(10, shape.slurmd_timeout))
    (etc / "slurm.conf").write_text(
        SLURM.format(
            root=root, port=ports[0], shape=shape, nodes="\n".join(lines), message_timeout=patience
        )
    )
    (etc / "node.conf").write_text(SLURMD.format(root=root))
    (etc / "hosts").write_text(f"127.0.0.1 localhost control {' '.join(nodes)}\n")
    key = etc / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    for number in range(shape.gpus):
        os.mknod(root / "dev" / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    devices = [
        f"NodeName={name} Name=gpu{f' Type={kind}' if kind else ''}"
        f" File={root}/dev/nvidia[0-{shape.gpus - 1}]"
        for name, kind in zip(nodes, types, strict=True)
        if shape.gpus
    ]
    (etc / "gres.conf").write_text("\n".join(["AutoDetect=off", *devices, ""]))
