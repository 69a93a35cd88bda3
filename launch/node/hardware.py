"""Query the state of a node's hardware from nvidia-smi and the kernel.

The queries concern GPUs and their faults, memory, folders, and network ports. Uses only the
standard library.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# A GPU with at least this much memory in use is busy; the driver itself uses much less.
BUSY_MIB = 2048
# Cells of nvidia-smi's output that mean that the GPU has no value.
NOTHING = frozenset(
    {
        "",
        "n/a",
        "[n/a]",
        "not supported",
        "[not supported]",
        "[not found]",
        "[insufficient permissions]",
    }
)

CORE = (
    "index uuid name pci.bus_id driver_version memory.total memory.used "
    "ecc.errors.uncorrected.volatile.total temperature.gpu"
).split()
ROWS = ["gpu_uuid", "remapped_rows.pending", "remapped_rows.failure"]
USERS = ["gpu_uuid", "pid", "process_name", "used_memory"]
THROTTLING = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
SAID = {
    "hw_thermal_slowdown": "its hardware slows it down for heat",
    "hw_power_brake_slowdown": "the power supply slows it down (power brake)",
    "sw_thermal_slowdown": "the driver slows it down for heat",
}


class SmiError(Exception):
    """nvidia-smi is missing, failed, or did not answer. The message is one line."""


@dataclass(frozen=True)
class Answer:
    """Result of a command: its exit code (None: killed after the time limit) and its output."""

    code: int | None  # None: it did not end in time and was killed
    output: str
    errors: str


@dataclass
class Gpu:
    """State of a GPU as nvidia-smi reports it.

    Sizes are in MiB, the temperature in °C. Values that nvidia-smi does not report are None.
    """

    index: int
    uuid: str
    name: str
    bus: str
    driver: str
    memory_total: int | None
    memory_used: int | None
    ecc_uncorrected: int | None  # since the driver was loaded
    temperature: int | None
    row_pending: bool = False  # a repair of its memory waits for a reset
    row_failure: bool = False  # a repair of its memory failed
    throttled: tuple[str, ...] = ()  # names from THROTTLING
    recovery: str | None = None  # the driver's request: Reset, Reboot, ...
    fabric: str | None = None  # NVSwitch: Completed, In Progress, Not Started
    users: tuple[str, ...] = ()  # "pid 12 (python, 71000 MiB)"
    odd: tuple[str, ...] = ()  # fields whose value is an error, such as memory.used [Unknown Error]

    @property
    def title(self) -> str:
        """Number and address of the GPU."""
        return f"GPU {self.index} ({self.bus})"

    def faults(self) -> list[str]:
        """Return the faults that make the GPU unfit for a run, one line each.

        Reduced clocks are not included (see `throttling`).
        """
        found = list(self.odd)
        if self.ecc_uncorrected:
            found.append(
                f"{self.ecc_uncorrected} uncorrected ECC errors since its driver was loaded: reset "
                "it"
            )
        if self.row_pending:
            found.append("a row of its memory waits to be remapped: reset it")
        if self.row_failure:
            found.append("a row of its memory could not be remapped: replace it")
        if self.recovery not in (None, "None"):
            found.append(f"its driver asks for: {self.recovery}")
        if self.fabric not in (None, "Completed"):
            found.append(
                f"its NVLink fabric is not up ({self.fabric}): is the fabric manager running?"
            )
        return [f"{self.title}: {fault}" for fault in found]

    def busy(self) -> list[str]:
        """Return a list with one line that names the processes on the GPU.

        The list is empty if less than BUSY_MIB of the GPU's memory is in use.
        """
        if (self.memory_used or 0) < BUSY_MIB:
            return []
        users = ", ".join(self.users) or "a process that is not visible to this one"
        return [f"{self.title}: {self.memory_used} MiB in use by {users}"]

    def throttling(self) -> tuple[list[str], list[str]]:
        """Return (faults, warnings) about reduced clocks, one line each.

        Reductions by the hardware are faults, reductions by the driver are warnings.
        """
        lines = {
            reason: f"{self.title}: {SAID[reason]} ({self.temperature} °C)"
            for reason in self.throttled
        }
        faults = [line for reason, line in lines.items() if reason.startswith("hw")]
        warnings = [line for reason, line in lines.items() if reason.startswith("sw")]
        return faults, warnings


def ask(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Answer:
    """Run a command with a time limit and return its result.

    After the time limit the command is killed, and the exit code in the result is None. This
    function does not wait for its end, because a process in a hanging driver cannot be killed.

    Raises:
        OSError: the command cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=max(seconds, 0.1))
    except subprocess.TimeoutExpired as late:
        os.killpg(process.pid, signal.SIGKILL)
        return Answer(None, _text(late.output), _text(late.stderr))
    return Answer(process.returncode, _text(output), _text(errors))


def survey(seconds: float) -> tuple[list[Gpu], list[str]]:
    """Return (the GPUs visible to this process, nvidia-smi's other output lines).

    The other lines do not describe a GPU; for example, they report a lost GPU. All queries together
    take at most ``seconds``.

    Raises:
        SmiError: nvidia-smi is missing, failed, or does not answer.
    """
    end, complaints = time.monotonic() + seconds, list[str]()

    def of_each(what: str, *fields: str) -> list[tuple[Gpu, list[str]]]:
        return _of_each(gpus, what, fields, end - time.monotonic())

    gpus = [_gpu(row) for row in _query("gpu", CORE, seconds, complaints)]
    if not gpus:
        return gpus, complaints
    for gpu, (pending, failure) in of_each("remapped-rows", *ROWS):
        gpu.row_pending, gpu.row_failure = _yes(pending), _yes(failure)
    for gpu, (action,) in of_each("gpu", "uuid", "gpu_recovery_action"):
        gpu.recovery = _word(action)
    for gpu, (state,) in of_each("gpu", "uuid", "fabric.state"):
        gpu.fabric = _word(state)
    for gpu, (pid, name, used) in of_each("compute-apps", *USERS):
        gpu.users += (f"pid {pid} ({name}, {used} MiB)",)
    throttle(gpus, end - time.monotonic())
    return gpus, complaints


def throttle(gpus: Sequence[Gpu], seconds: float) -> None:
    """Set ``throttled`` of each GPU to the reasons for which its clocks are reduced now.

    The field names of older drivers are tried too.
    """
    for prefix in ("clocks_event_reasons", "clocks_throttle_reasons"):
        rows = _of_each(
            gpus, "gpu", ["uuid", *(f"{prefix}.{name}" for name in THROTTLING)], seconds
        )
        for gpu, states in rows:
            gpu.throttled = tuple(
                name for name, state in zip(THROTTLING, states, strict=True) if state == "Active"
            )
        if rows:
            return


def _of_each(
    gpus: Sequence[Gpu], what: str, fields: Sequence[str], seconds: float
) -> list[tuple[Gpu, list[str]]]:
    """Query nvidia-smi and return (GPU, cells after the UUID) for each row of one of ``gpus``.

    what: the query, as in --query-WHAT. fields: the first one is the UUID of the GPU.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    return [
        (by_uuid[uuid], cells)
        for uuid, *cells in _optional(what, fields, seconds)
        if uuid in by_uuid
    ]


def listed(seconds: float) -> int:
    """Return the number of GPUs that nvidia-smi lists for this process.

    Return 0 without GPUs or nvidia-smi.
    """
    try:
        return len(
            re.findall(r"^GPU \d+:", ask(["nvidia-smi", "-L"], seconds).output, re.MULTILINE)
        )
    except OSError:
        return 0


def named_gpus(seconds: float) -> list[str]:
    """Return a description of each kind of GPU in this node, with the number of equal GPUs.

    An example is ``8 x NVIDIA H100 80GB HBM3, compute capability 9.0``. Return an empty list if
    nvidia-smi does not report the GPUs.
    """
    rows = [
        f"{name}, compute capability {capability}"
        for name, capability in _optional("gpu", ["name", "compute_cap"], seconds)
    ]
    return [f"{rows.count(row)} x {row}" for row in dict.fromkeys(rows)]


def chosen(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects by number or UUID.

    Return all GPUs if the variable is empty or one of its entries is not a listed GPU.

    visible: value of the variable.
    """
    words = [word.strip() for word in (visible or "").split(",") if word.strip()]
    found = [
        gpu
        for word in words
        for gpu in gpus
        if word == str(gpu.index) or (len(word) > 4 and gpu.uuid.startswith(word))
    ]
    return found if words and len(found) == len(words) else list(gpus)


def _query(
    what: str, fields: Sequence[str], seconds: float, complaints: list[str]
) -> list[list[str]]:
    """Return nvidia-smi's rows for some fields. Append its other lines to ``complaints``.

    Raises:
        SmiError: nvidia-smi is missing, failed, or does not answer.
    """
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = ask(command, seconds)
    except OSError as error:
        raise SmiError(
            f"nvidia-smi cannot be started ({error.strerror}): is the NVIDIA driver installed here?"
        ) from None
    if answer.code is None:
        raise SmiError(
            f"nvidia-smi did not answer in {seconds:.1f} s: the driver hangs, or a GPU is lost"
        )
    rows = []
    for line in answer.output.splitlines():
        row = [cell.strip() for cell in next(csv.reader([line]), [])]
        if len(row) == len(fields):
            rows.append(row)
        elif line.strip() and line.strip() != "No devices were found":
            complaints.append(line.strip())
    if answer.code and not rows and not complaints and "No devices were found" not in answer.output:
        raise SmiError(
            f"nvidia-smi failed with exit code {answer.code}: "
            f"{last_line(answer.errors) or last_line(answer.output) or 'no output'}"
        )
    return rows


def _optional(what: str, fields: Sequence[str], seconds: float) -> list[list[str]]:
    """Return nvidia-smi's rows for fields that a driver or a GPU may not support.

    Return an empty list if the query fails.
    """
    try:
        return _query(what, fields, seconds, [])
    except SmiError:
        return []


def _gpu(row: Sequence[str]) -> Gpu:
    """Convert a row with the fields of CORE to a `Gpu`."""
    index, uuid, name, bus, driver, *numbers = row
    total, used, ecc, temperature = (int(cell) if cell.isdigit() else None for cell in numbers)
    odd = [
        f"{title} {cell}"
        for title, cell in zip(CORE, row, strict=True)
        if cell.startswith(("[", "ERR")) and cell.lower() not in NOTHING
    ]
    return Gpu(
        int(index) if index.isdigit() else -1,
        uuid,
        name,
        bus,
        driver,
        total,
        used,
        ecc,
        temperature,
        odd=tuple(odd),
    )


def _word(cell: str) -> str | None:
    """Return a cell of nvidia-smi's output, or None if it means that the GPU has no value."""
    return None if cell.lower() in NOTHING else cell


def _yes(cell: str) -> bool:
    """Return True if a cell of nvidia-smi's output means yes, in any driver's spelling."""
    return cell.lower() in ("yes", "1", "true")


def _text(raw: bytes | str | None) -> str:
    """Decode a process's output; None gives ""."""
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""


def last_line(text: str) -> str:
    """Return the last non-empty line of a text, or ""."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


GB = 1e9
XID = re.compile(
    r"^\[\s*(?P<at>\d+\.\d+)\].*?NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+)(?:, "
    r"(?P<said>.*))?$"
)
# Older errors are ignored: they had no effect, or the GPU has been reset since.
RECENT_SECONDS = 3600.0
# Numbers of the Xid errors in NVIDIA's list that concern the hardware, the driver or the links, and
# after which the GPU needs a reset, a reboot or a repair. All others (13, 31, 43, 45, 63, 94 ...)
# are errors of a program, or the driver has handled them.
BROKEN = frozenset({48, 61, 62, 64, 74, 79, 95, 119, 120, 140, 143})


def memory_gb() -> tuple[float, float, float | None]:
    """Return (free memory, total memory, free space of /dev/shm) in GB.

    The last value is None if /dev/shm does not exist.
    """
    pairs = (
        line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    known = {words[0].rstrip(":"): int(words[1]) * 1024 / GB for words in pairs if len(words) > 1}
    try:
        shm = round(shutil.disk_usage("/dev/shm").free / GB, 3)
    except OSError:
        shm = None
    return round(known.get("MemAvailable", known["MemFree"]), 2), round(known["MemTotal"], 2), shm


def probe_folder(folder: Path) -> float:
    """Check that a folder can be written and read, and return its free space in GB.

    A small file is written, read back and removed.

    Raises:
        OSError: one of these steps failed.
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
    """Return DEVICE/PORT -> state (ACTIVE, DOWN, INIT ...) of the InfiniBand, RoCE and EFA ports.

    Return {} if this node has no ports.
    """
    ports = {}
    for path in sorted(root.glob("*/ports/*/state")):
        try:
            state = path.read_text(encoding="ascii").strip().rpartition(" ")[2]
        except OSError:
            continue
        ports[f"{path.parts[-4]}/{path.parts[-2]}"] = state
    return ports


def recent_xids(now: float | None = None) -> list[tuple[int, str]]:
    """Return (number, text) of the Xid errors that the NVIDIA driver reported in the last hour.

    Only the latest error for each number and device is included. Return an empty list if the kernel
    log cannot be read.

    now: seconds since the machine started; default: read from /proc/uptime.
    """
    try:
        answer = ask(["dmesg"], 10)
        if now is None:
            now = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return []
    found: dict[tuple[str, str], str] = {}
    for line in answer.output.splitlines() if answer.code == 0 else ():
        match = XID.match(line.strip())
        if match and now - float(match["at"]) <= RECENT_SECONDS:
            ago = max(0, now - float(match["at"])) / 60
            text = (
                f"Xid {match['number']} ({match['device']}) {ago:.0f} minutes ago: "
                f"{match['said'] or 'no text'}"
            )
            found[match["number"], match["device"]] = text
    return [(int(number), text) for (number, _), text in found.items()]
