"""What Slurm's fields of a job, its refusals and a node's faults are taken to mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.node.hardware import Gpu
from launch.supervise.classify import cancelled, has_features, is_away, is_lasting, taken

RUNNING = {"JobState": "RUNNING", "Reason": "None", "Restarts": "1", "ExitCode": "0:0", "PreemptTime": "None"}
ENDING = {"JobState": "COMPLETING"}
PREEMPTED = {"PreemptTime": "2026-01-01T00:00:00"}


@pytest.mark.parametrize(
    ("fields", "by_a_person", "away"),
    [
        ({}, False, None),
        (ENDING, True, False),
        ({"JobState": "CANCELLED"}, True, False),
        (PREEMPTED, False, True),  # with time to save in
        ({**ENDING, **PREEMPTED}, False, True),  # PreemptMode=CANCEL
        ({"JobState": "PREEMPTED"}, False, True),
        ({**ENDING, "Restarts": "2"}, False, True),  # requeued by someone, or for a lost node
        ({"JobState": "PENDING", "Restarts": "2", "Reason": "BeginTime"}, False, True),
        ({**ENDING, "Reason": "NodeDown"}, False, True),
        ({**ENDING, "Reason": "TimeLimit"}, False, False),
        ({"JobState": "TIMEOUT", "Reason": "TimeLimit"}, False, False),
    ],
)
def test_who_ends_a_job(fields: dict[str, str], by_a_person: bool, away: bool | None) -> None:
    job = {**RUNNING, **fields}
    assert (cancelled(job, 1), taken(job, 1)) == (by_a_person, away)


def test_a_controller_that_is_away_is_no_refusal() -> None:
    for words in (
        "scontrol: Slurm gave no answer in 20 seconds; is slurmctld up? (scontrol ping)",
        "scontrol: Unable to contact slurm controller (connect failure)",
        "scontrol: Unexpected message received for job 7",
        "scontrol: slurm_update error: Socket timed out on send/recv operation",
    ):
        assert is_away(words)
    assert not is_away("scontrol: Requested operation is presently disabled for job 7")
    assert not is_away("scontrol: Job is pending execution for job 7")


SOUND = Gpu(3, "GPU-1", "H100", "0000:3B:00.0", "550", memory_total=80000, memory_used=0, ecc_uncorrected=0, temperature=40)


@pytest.mark.parametrize(
    ("fault", "lasting"),
    [
        (replace(SOUND, ecc_uncorrected=2).faults()[0], True),
        (replace(SOUND, row_pending=True).faults()[0], True),
        (replace(SOUND, row_failure=True).faults()[0], True),
        (replace(SOUND, recovery="Reset").faults()[0], True),
        ("Xid 79 (PCI:0000:3b:00) 4 minutes ago: GPU has fallen off the bus.", True),
        ("7 GPUs are visible, the profile says 8", True),
        ("0 GPUs are visible, the profile says 8", False),  # none was asked for, or the driver is not loaded yet
        ("nvidia-smi: Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.", True),
        ("GPU 3 (0000:3B:00.0): 12 entries of a product are wrong", True),
        ("GPU 3 (0000:3B:00.0): a product did not end in time: it hangs", False),
        ("GPU 3 (0000:3B:00.0): 71000 MiB in use by pid 12 (python, 71000 MiB)", False),
        ("GPU 3 (0000:3B:00.0): slowed down by the hardware: heat (91 °C)", False),
        ("did not answer the health check: it hangs, or cannot see this folder", False),
        ("/shared: cannot be written here: Permission denied (is it mounted?)", False),
        ("/env/python: there is no such program here (is its file system mounted?)", False),
        ("/tmp: 0.20 GB free; 1 are wanted", False),
    ],
)
def test_a_fault_of_the_hardware_stays(fault: str, lasting: bool) -> None:
    assert is_lasting(fault) == lasting


@pytest.mark.parametrize(
    ("available", "wanted", "fits"),
    [
        ("h100,ib", "", True),
        ("h100,ib", "(null)", True),
        ("h100,ib", "h100&ib", True),
        ("h100", "ib", False),
        ("(null)", "ib", False),
        ("a", "[a|b]", True),
    ],
)
def test_features(available: str, wanted: str, fits: bool) -> None:
    assert has_features(available, wanted) == fits
