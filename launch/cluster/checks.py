"""Check a profile through Slurm from the submitting host, for `launch doctor --cluster`.

The checks concern the controller, the partition, the nodes, the account, and a test submission.
"""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from fem_common.text import counted, first_few, nearest
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
        answers = [
            line.strip() for line in slurm.call("scontrol", "ping").splitlines() if line.strip()
        ]
        if not any(line.endswith("UP") for line in answers):
            raise slurm.SlurmError(
                f"{'; '.join(answers)}: ask the administrators, or try again later"
            )
        yield Check("ok", "Slurm", f"{version}; {'; '.join(answers)}")
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
    default = [name for name, found in known.items() if found.get("Default") == "YES"]
    wanted = profile.slurm.partition.split(",") if profile.slurm.partition else default
    if not wanted:
        text = f"the cluster has no default partition; it has {', '.join(known) or 'none'}"
        return [Check("FAILED", "partition", text, "set slurm.partition")], []
    lines = []
    for name in wanted:
        state = known.get(name, {}).get("State")
        level, remedy = "FAILED", "choose another, or ask the administrators"
        if name not in known:
            near = nearest(name, known, 0.5)
            others = f"choose one of {', '.join(list(known)[:LISTED])}"
            text = f"partition {name} does not exist"
            remedy = f"slurm.partition: {f'did you mean {near}?' if near else others}"
        elif state != "UP":
            text = f"{name} is {state}"
        else:
            nodes = counted(int(known[name].get("TotalNodes", 0)), "node")
            level = "ok"
            text = f"{name} is up, {nodes}"
            remedy = ""
        lines.append(Check(level, "partition", text, remedy))
    return lines, [name for name in wanted if name in known]


def limits(profile: Profile, found: Mapping[str, str], nodes_wanted: int | None) -> Iterator[Check]:
    """Compare the profile's time limit, account, QOS and node count with a partition's limits.

    found: scontrol's fields of the partition.
    """
    name, most = found["PartitionName"], seconds(found.get("MaxTime", "UNLIMITED"))
    slurm = profile.slurm
    wanted = seconds(slurm.time) if slurm.time else None
    default = found.get("DefaultTime", "NONE")
    level, remedy = "ok", ""
    if wanted is not None and wanted > most:
        level = "FAILED"
        text = f"slurm.time = {slurm.time} is more than partition {name} allows: {found['MaxTime']}"
        remedy = f"slurm.time: {found['MaxTime']} (a run outlives it: it saves and requeues itself)"
    elif wanted is None and default != "NONE" and seconds(default) < most:
        level, remedy = "warning", "set slurm.time"
        text = f"slurm.time is null: a submission gets {default}"
    elif (wanted or most) <= 2 * slurm.signal_seconds:
        level, remedy = "warning", "a longer slurm.time, or a smaller slurm.signal_seconds"
        text = f"slurm.signal_seconds = {slurm.signal_seconds} leaves little of slurm.time for work"
    else:
        limit = found.get("MaxTime")
        text = f"{slurm.time or limit}, partition {name} allows up to {limit}"
    yield Check(level, "time limit", text, remedy)
    for what, key, value in (
        ("account", "AllowAccounts", slurm.account),
        ("QOS", "AllowQos", slurm.qos),
    ):
        allowed = found.get(key, "ALL")
        if value and allowed not in ("ALL", "(null)") and value not in allowed.split(","):
            text = f"partition {name} does not allow {value}"
            yield Check("FAILED", what, text, f"slurm.{what.lower()}: one of {allowed}")
    largest = found.get("MaxNodes", "UNLIMITED")
    if nodes_wanted and largest.isdigit() and nodes_wanted > int(largest):
        text = f"partition {name} allows {largest} nodes per job, {nodes_wanted} are requested"
        yield Check("FAILED", "nodes", text, "fewer --nodes")


def machines(
    profile: Profile, known: Sequence[Node], chosen: Sequence[str], nodes_wanted: int | None
) -> Iterator[Check]:
    """Check that enough nodes have the resources in the profile, and count the nodes in service.

    known: all nodes of the cluster. chosen: names of the profile's partitions.
    """
    failed, warning = partial(Check, "FAILED", "nodes"), partial(Check, "warning", "nodes")
    mine = [node for node in known if set(node.partitions) & set(chosen)]
    wanted, gpus = profile.nodes, requested_gpus(profile)
    if not mine:
        yield failed(
            f"partition {', '.join(chosen)} has no nodes", "choose another slurm.partition"
        )
        return
    most = max(node.gpus for node in mine)
    if most < gpus:
        none = (
            "choose a partition with GPUs; where Slurm knows no GPUs on any node (no Gres), "
            "nodes.gres: none"
        )
        yield failed(
            f"the profile takes {counted(gpus, 'GPU')} a node; the nodes have {most}",
            f"nodes.gpus: {most}" if most else none,
        )
        return
    memory = mebibytes(wanted.memory)
    fit = [
        node
        for node in mine
        if node.gpus >= gpus and node.cpus >= wanted.cpus and node.memory >= memory
    ]
    if not fit:
        takes = f"{wanted.cpus} CPUs" + (f" and {wanted.memory} of memory" if wanted.memory else "")
        yield failed(
            f"the profile takes {takes} of a node; no node has as much",
            f"nodes.cpus: {max(node.cpus for node in mine)} at most; nodes.memory: "
            f"{max(node.memory for node in mine)}M at most",
        )
        return
    if gpus and most > gpus and wanted.exclusive:
        yield warning(
            f"nodes have {most} GPUs, the profile takes {gpus} and the whole node",
            f"nodes.gpus: {most}",
        )
    if wanted.gpus and not gpus and most:
        yield warning(
            f"nodes.gres = {wanted.gres} requests none of the nodes' {counted(most, 'GPU')}, which "
            "Slurm may then hide",
            "nodes.gres: null",
        )
    excluded = hosts(profile.slurm.exclude)
    left = [node for node in fit if node.in_service and node.name not in excluded]
    away = [
        f"{node.name} {node.state} ({node.reason or 'no reason given'})"
        for node in fit
        if not node.in_service
    ]
    if away:
        yield warning(f"{len(away)} out of service: {first_few(away, LISTED, '; ')}")
    if len(left) < (nodes_wanted or 1):
        yield failed(
            f"{counted(len(left), 'node')} in service fit the profile, {nodes_wanted or 1} wanted",
            "fewer --nodes, or wait for the others",
        )
        return
    has = f"{counted(gpus, 'GPU')} and " if gpus else ""
    text = f"{len(left)} of {len(mine)} are in service and have {has}"
    yield Check("ok", "nodes", f"{text}{counted(wanted.cpus, 'CPU')} or more")


def requested_gpus(profile: Profile) -> int:
    """Return the number of GPUs per node that the profile requests from Slurm.

    It is 0 if nodes.gres names no GPU, even if the nodes have GPUs.
    """
    gres = profile.nodes.gres
    return (profile.nodes.gpus or 0) if gres is None or "gpu" in gres else 0


def account(profile: Profile, configuration: Mapping[str, str]) -> Check:
    """Check that accounting lets this user use the profile's account and QOS.

    The check passes if the cluster has no accounting.
    """
    if "slurmdbd" not in configuration.get("AccountingStorageType", ""):
        return Check("ok", "account", "this cluster has no accounting")
    if shutil.which("sacctmgr") is None:
        return Check("warning", "account", "not checked: sacctmgr is not installed on this host")
    user, slurm_profile = getpass.getuser(), profile.slurm
    query = ("show", "assoc", f"user={user}", "format=account,qos")
    try:
        answer = slurm.call("sacctmgr", "--noheader", "--parsable2", *query)
    except slurm.SlurmError as error:
        return Check("warning", "account", f"not checked: {error}")
    qos_of: dict[str, set[str]] = {}
    for line in answer.splitlines():
        name, _, qos = line.partition("|")
        qos_of.setdefault(name, set()).update(qos.split(","))
    if not qos_of:
        text = f"user {user} is in no account"
        if "associations" not in configuration.get("AccountingStorageEnforce", ""):
            return Check("ok", "account", text)
        return Check("FAILED", "account", text, "ask the administrators for one")
    accounts, mine = ", ".join(list(qos_of)[:LISTED]), slurm_profile.account
    if mine and mine not in qos_of:
        text = f"user {user} is not in the account {mine}"
        return Check("FAILED", "account", text, f"slurm.account: one of {', '.join(qos_of)}")
    allowed = qos_of[mine] if mine else set().union(*qos_of.values())
    if slurm_profile.qos and slurm_profile.qos not in allowed:
        text = f"user {user} may not use the QOS {slurm_profile.qos}"
        return Check("FAILED", "QOS", text, f"slurm.qos: one of {', '.join(sorted(allowed))}")
    return Check("ok", "account", f"{mine or 'the default'} (of {accounts})")


def preemption(configuration: Mapping[str, str]) -> Iterator[Check]:
    """Check that Slurm signals a preempted job early enough for it to save a checkpoint.

    Yield no check if the cluster does not preempt jobs.
    """
    if configuration.get("PreemptMode", "OFF") in ("OFF", "GANG", "SUSPEND,GANG"):
        return
    # SlurmctldParameters=preempt_send_user_signal, or by its newer name
    # PreemptParameters=send_user_signal.
    keys = ("SlurmctldParameters", "PreemptParameters")
    if any("send_user_signal" in configuration.get(key, "") for key in keys):
        text = (
            "a preempted job is sent its signal at once, and has the partition's GraceTime to save"
        )
        yield Check("ok", "preemption", text)
        return
    wait = configuration.get("KillWait", "30 sec")
    text = (
        f"a preempted job is sent SIGTERM and has its partition's GraceTime, or KillWait ({wait}), "
        "to save"
    )
    remedy = "save often enough, or ask for SlurmctldParameters=preempt_send_user_signal"
    yield Check("warning", "preemption", text, remedy)


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
