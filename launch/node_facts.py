"""launch: what the kernel says of a node: memory, folders, network ports, GPU errors. Standard library alone: it runs inside jobs."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from launch import gpus

GB = 1e9
XID = re.compile(r"^\[\s*(?P<at>\d+\.\d+)\].*?NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+)(?:, (?P<said>.*))?$")
RECENT_SECONDS = 3600.0  # an older error has been lived with, or its GPU was reset since
# By NVIDIA's list of Xid errors. Of the hardware, the driver or the links: the GPU needs a reset, a reboot or a technician.
# The others (13, 31, 43, 45, 63, 94 ...) are a program's own, or dealt with already.
BROKEN = frozenset({48, 61, 62, 64, 74, 79, 95, 119, 120, 140, 143})


@dataclass(frozen=True)
class Xid:
    """An error that the NVIDIA driver wrote into the kernel's log."""

    number: int
    device: str  # PCI:0000:3b:00
    text: str

    @property
    def broken(self) -> bool:
        """Whether it means that the GPU is not fit for use."""
        return self.number in BROKEN


def memory_gb() -> tuple[float, float, float | None]:
    """(free, whole) memory and the free part of /dev/shm (None: there is none), in GB."""
    pairs = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    known = {words[0].rstrip(":"): int(words[1]) * 1024 / GB for words in pairs if len(words) > 1}
    try:
        shm = round(shutil.disk_usage("/dev/shm").free / GB, 3)
    except OSError:
        shm = None
    return round(known.get("MemAvailable", known["MemFree"]), 2), round(known["MemTotal"], 2), shm


def probe_folder(folder: Path) -> float:
    """Write a file, read it back, remove it: the folder's free space in GB.

    Raises:
        OSError: one of these failed.
    """
    path = folder / f".launch_check_{os.uname().nodename}_{os.getpid()}_{os.urandom(4).hex()}"
    try:
        with path.open("xb") as file:
            file.write(b"written by a health check\n")
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != b"written by a health check\n":
            raise OSError("what was written is not what is read")
    finally:
        path.unlink(missing_ok=True)
    return round(shutil.disk_usage(folder).free / GB, 3)


def network_ports(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """InfiniBand, RoCE and EFA ports -> their state (ACTIVE, DOWN, INIT ...); empty where there are none."""
    ports = {}
    for path in sorted(root.glob("*/ports/*/state")):
        try:
            state = path.read_text(encoding="ascii").strip().rpartition(" ")[2]
        except OSError:
            continue
        ports[f"{path.parts[-4]}/{path.parts[-2]}"] = state
    return ports


def recent_xids(now: float | None = None) -> list[Xid] | None:
    """The driver's errors of the last hour, one of each number and device, the latest; None where the log may not be read.

    now: seconds since the machine started.
    """
    try:
        answer = gpus.ask(["dmesg"], 10)
        now = now if now is not None else float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    if answer.code != 0:
        return None
    found: dict[tuple[int, str], Xid] = {}
    for line in answer.output.splitlines():
        match = XID.match(line.strip())
        if match and now - float(match["at"]) <= RECENT_SECONDS:
            ago = max(0, now - float(match["at"])) / 60
            text = f"Xid {match['number']} ({match['device']}) {ago:.0f} minutes ago: {match['said'] or 'no text'}"
            found[int(match["number"]), match["device"]] = Xid(int(match["number"]), match["device"], text)
    return list(found.values())
