"""Check a profile through Slurm from the submitting host, for `launch doctor --cluster`.

The checks concern the controller, the partition, the nodes, the account, and a test submission.
"""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fem_common.text import counted, nearest
from launch.cluster import slurm
from launch.cluster.profile import Profile
from launch.cluster.profile_values import seconds
from launch.cluster.slurm import Node, all_nodes, fields, hosts, mebibytes, records
from launch.node.checks import Check

LISTED = 8  # most names in a message


def of_slurm(profile: Profile, nodes_wanted: int | None) -> Iterator[Check]:
    """Yield all of `doctor`'s Slurm checks that need no job.

    nodes_wanted: number of nodes that a job would take; None if not given.
    """
    try:
        version = slurm.call("sbatch", "--version").split()[-1]
        said = [
            line.strip() for line in slurm.call("scontrol", "ping").splitlines() if line.strip()
        ]
        if not any(line.endswith("UP") for line in said):
            raise slurm.SlurmError(f"{'; '.join(said)}: ask the administrators, or try again later")
        yield Check("ok", "Slurm", f"{version}; {'; '.join(said)}")
    except slurm.SlurmError as error:
        yield Check("FAILED", "Slurm", str(error))
        return
    try:
        configuration = fields(slurm.call("scontrol", "show", "config"), separator="\n")
        known = {
            found["PartitionName"]: found
            for found in records(slurm.call("scontrol", "show", "partition", "--oneliner"))
        }
        found, chosen = partition(profile, known)
        yield from found
        for name in chosen:
            yield from limits(profile, known[name], nodes_wanted)
        if chosen and (nodes := all_nodes()):
            yield from machines(profile, nodes, chosen, nodes_wanted)
        elif chosen:
            yield Check(
                "warning", "nodes", "not checked: this site lists no nodes (PrivateData=nodes)"
            )
        yield account(profile, configuration)
        yield from preemption(configuration)
    except slurm.SlurmError as error:
        yield Check("FAILED", "Slurm", str(error))


def partition(
    profile: Profile, known: Mapping[str, Mapping[str, str]]
) -> tuple[list[Check], list[str]]:
    """Check that the profile's partitions exist and are up.

    known: partition name -> fields of scontrol. Return the checks and the names of the existing
    partitions.
    """
    wanted = (
        profile.slurm.partition.split(",")
        if profile.slurm.partition
        else [n for n, p in known.items() if p.get("Default") == "YES"]
    )
    if not wanted:
        names = ", ".join(known) or "none"
        return [
            Check(
                "FAILED",
                "partition",
                f"the cluster has no default partition; it has {names}",
                "set slurm.partition",
            )
        ], []
    lines = []
    for name in wanted:
        if name not in known:
            near = nearest(name, known, 0.5)
            hint = (
                f"did you mean {near}?"
                if near
                else f"choose one of {', '.join(list(known)[:LISTED])}"
            )
            lines.append(
                Check(
                    "FAILED",
                    "partition",
                    f"partition {name} does not exist",
                    f"slurm.partition: {hint}",
                )
            )
        elif known[name].get("State") != "UP":
            lines.append(
                Check(
                    "FAILED",
                    "partition",
                    f"{name} is {known[name].get('State')}",
                    "choose another, or ask the administrators",
                )
            )
        else:
            lines.append(
                Check(
                    "ok",
                    "partition",
                    f"{name} is up, {counted(int(known[name].get('TotalNodes', 0)), 'node')}",
                )
            )
    return lines, [name for name in wanted if name in known]


def limits(profile: Profile, found: Mapping[str, str], nodes_wanted: int | None) -> Iterator[Check]:
    """Compare the profile's time limit, account, QOS and node count with a partition's limits.

    found: scontrol's fields of the partition.
    """
    name, most = found["PartitionName"], seconds(found.get("MaxTime", "UNLIMITED"))
    wanted = seconds(profile.slurm.time) if profile.slurm.time else None
    if wanted is not None and wanted > most:
        text = (
            f"slurm.time = {profile.slurm.time} is more than partition {name} allows: "
            f"{found['MaxTime']}"
        )
        yield Check(
            "FAILED",
            "time limit",
            text,
            f"slurm.time: {found['MaxTime']} (a run outlives it: it saves and requeues itself)",
        )
    elif (
        wanted is None
        and found.get("DefaultTime") not in (None, "NONE")
        and seconds(found["DefaultTime"]) < most
    ):
        yield Check(
            "warning",
            "time limit",
            f"slurm.time is null: a submission gets {found['DefaultTime']}",
            "set slurm.time",
        )
    elif (wanted or most) <= 2 * profile.slurm.signal_seconds:
        text = (
            f"slurm.signal_seconds = {profile.slurm.signal_seconds} leaves little of slurm.time "
            "for work"
        )
        yield Check(
            "warning", "time limit", text, "a longer slurm.time, or a smaller slurm.signal_seconds"
        )
    else:
        text = (
            f"{profile.slurm.time or found.get('MaxTime')}, partition {name} allows up to "
            f"{found.get('MaxTime')}"
        )
        yield Check("ok", "time limit", text)
    for what, key, value in (
        ("account", "AllowAccounts", profile.slurm.account),
        ("QOS", "AllowQos", profile.slurm.qos),
    ):
        allowed = found.get(key, "ALL")
        if value and allowed not in ("ALL", "(null)") and value not in allowed.split(","):
            yield Check(
                "FAILED",
                what,
                f"partition {name} does not allow {value}",
                f"slurm.{what.lower()}: one of {allowed}",
            )
    largest = found.get("MaxNodes", "UNLIMITED")
    if nodes_wanted and largest.isdigit() and nodes_wanted > int(largest):
        yield Check(
            "FAILED",
            "nodes",
            f"partition {name} allows {largest} nodes per job, {nodes_wanted} are requested",
            "fewer --nodes",
        )


def machines(
    profile: Profile, known: Sequence[Node], chosen: Sequence[str], nodes_wanted: int | None
) -> Iterator[Check]:
    """Check that enough nodes have the resources in the profile, and count the nodes in service.

    known: all nodes of the cluster. chosen: names of the profile's partitions.
    """
    mine = [node for node in known if set(node.partitions) & set(chosen)]
    wanted, gpus = profile.nodes, gpus_asked(profile)
    if not mine:
        yield Check(
            "FAILED",
            "nodes",
            f"partition {', '.join(chosen)} has no nodes",
            "choose another slurm.partition",
        )
        return
    most = max(node.gpus for node in mine)
    fit = [
        node
        for node in mine
        if node.gpus >= gpus
        and node.cpus >= wanted.cpus
        and node.memory >= mebibytes(wanted.memory)
    ]
    if most < gpus:
        text = f"the profile takes {counted(gpus, 'GPU')} a node; the nodes have {most}"
        none = (
            "choose a partition with GPUs; where Slurm knows no GPUs on any node (no Gres), "
            "nodes.gres: none"
        )
        yield Check("FAILED", "nodes", text, f"nodes.gpus: {most}" if most else none)
        return
    if not fit:
        cpus, memory = max(node.cpus for node in mine), max(node.memory for node in mine)
        takes = f"{wanted.cpus} CPUs" + (f" and {wanted.memory} of memory" if wanted.memory else "")
        text = f"the profile takes {takes} of a node; no node has as much"
        yield Check(
            "FAILED", "nodes", text, f"nodes.cpus: {cpus} at most; nodes.memory: {memory}M at most"
        )
        return
    if gpus and most > gpus and wanted.exclusive:
        yield Check(
            "warning",
            "nodes",
            f"nodes have {most} GPUs, the profile takes {gpus} and the whole node",
            f"nodes.gpus: {most}",
        )
    if wanted.gpus and not gpus and most:
        text = (
            f"nodes.gres = {wanted.gres} requests none of the nodes' {counted(most, 'GPU')}, which "
            "Slurm may then hide"
        )
        yield Check("warning", "nodes", text, "nodes.gres: null")
    away, excluded = [node for node in fit if not node.in_service], hosts(profile.slurm.exclude)
    left = [node for node in fit if node.in_service and node.name not in excluded]
    if away:
        told = "; ".join(
            f"{node.name} {node.state} ({node.reason or 'no reason given'})"
            for node in away[:LISTED]
        )
        yield Check(
            "warning",
            "nodes",
            f"{len(away)} out of service: {told}{' ...' if len(away) > LISTED else ''}",
        )
    if len(left) < (nodes_wanted or 1):
        text = (
            f"{counted(len(left), 'node')} in service fit the profile, {nodes_wanted or 1} wanted"
        )
        yield Check("FAILED", "nodes", text, "fewer --nodes, or wait for the others")
        return
    has = f"{counted(gpus, 'GPU')} and " if gpus else ""
    yield Check(
        "ok",
        "nodes",
        (
            f"{len(left)} of {len(mine)} are in service and have "
            f"{has}{counted(wanted.cpus, 'CPU')} or more"
        ),
    )


def gpus_asked(profile: Profile) -> int:
    """Return the number of GPUs per node that the profile requests from Slurm.

    It is 0 if nodes.gres names no GPU, even if the nodes have GPUs.
    """
    gres = profile.nodes.gres
    return (profile.nodes.gpus or 0) if gres is None or "gpu" in gres else 0


def account(profile: Profile, configuration: Mapping[str, str]) -> Check:
    """Check that accounting lets this user use the profile's account and QOS.

    The check passes if the cluster has no accounting.
    """
    storage = configuration.get("AccountingStorageType", "")
    if "slurmdbd" not in storage:
        return Check("ok", "account", "this cluster has no accounting")
    if shutil.which("sacctmgr") is None:
        return Check("warning", "account", "not checked: sacctmgr is not installed on this host")
    user = getpass.getuser()
    try:
        answer = slurm.call(
            "sacctmgr",
            "--noheader",
            "--parsable2",
            "show",
            "assoc",
            f"user={user}",
            "format=account,qos",
        )
    except slurm.SlurmError as error:
        return Check("warning", "account", f"not checked: {error}")
    rows = [
        (name, qos.split(","))
        for name, _, qos in (line.partition("|") for line in answer.splitlines() if line)
    ]
    accounts = list(dict.fromkeys(name for name, _ in rows))
    enforced = "associations" in configuration.get("AccountingStorageEnforce", "")
    if not rows:
        text = f"user {user} is in no account"
        return Check(
            "FAILED" if enforced else "ok",
            "account",
            text,
            "ask the administrators for one" if enforced else "",
        )
    if profile.slurm.account and profile.slurm.account not in accounts:
        text = f"user {user} is not in the account {profile.slurm.account}"
        return Check("FAILED", "account", text, f"slurm.account: one of {', '.join(accounts)}")
    mine = {qos for name, names in rows for qos in names if profile.slurm.account in (None, name)}
    if profile.slurm.qos and profile.slurm.qos not in mine:
        text = f"user {user} may not use the QOS {profile.slurm.qos}"
        return Check("FAILED", "QOS", text, f"slurm.qos: one of {', '.join(sorted(mine))}")
    return Check(
        "ok",
        "account",
        f"{profile.slurm.account or 'the default'} (of {', '.join(accounts[:LISTED])})",
    )


def preemption(configuration: Mapping[str, str]) -> Iterator[Check]:
    """Check that Slurm signals a preempted job early enough for it to save a checkpoint.

    Yield no check if the cluster does not preempt jobs.
    """
    if configuration.get("PreemptMode", "OFF") in ("OFF", "GANG", "SUSPEND,GANG"):
        return
    # SlurmctldParameters=preempt_send_user_signal, or by its newer name
    # PreemptParameters=send_user_signal.
    if any(
        "send_user_signal" in configuration.get(key, "")
        for key in ("SlurmctldParameters", "PreemptParameters")
    ):
        yield Check(
            "ok",
            "preemption",
            "a preempted job is sent its signal at once, and has the partition's GraceTime to save",
        )
        return
    wait = configuration.get("KillWait", "30 sec")
    text = (
        f"a preempted job is sent SIGTERM and has its partition's GraceTime, or KillWait ({wait}), "
        "to save"
    )
    yield Check(
        "warning",
        "preemption",
        text,
        "save often enough, or ask for SlurmctldParameters=preempt_send_user_signal",
    )


def would_take(script: Path) -> Check:
    """Check with `sbatch --test-only` that Slurm would accept a batch script."""
    try:
        slurm.call("sbatch", "--test-only", str(script))
    except slurm.SlurmError as error:
        return Check(
            "FAILED",
            "sbatch",
            str(error),
            "the #SBATCH lines are in `submit --dry-run`; the slurm and nodes sections make them",
        )
    return Check("ok", "sbatch", "Slurm would accept this job")
