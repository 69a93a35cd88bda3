"""AdamW is fused in every engine and for every optimizer: its state, old checkpoints, and its
behaviour on a GPU.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fem_common.files import sha256
from fem_megatron.megatron import upstream
from pretrain.checkpoint.folder import MANIFEST
from pretrain.checkpoint.reader import read_common
from pretrain.config import OptimizerConfig
from pretrain.engines.building import fuse
from tests.pretrain.conftest import Command, back_to, edit
from tests.pretrain.jobs import MUON, deepspeed, quick_or_slow
from tests.pretrain.test_rehearsal import ON_A_GPU, PLAIN, config_of
from tests.pretrain.test_resume import groups_of
from tests.ranks import answer, losses

WHOLE = "parallel.use_distributed_optimizer=false"
RUNS: dict[str, list[str]] = {
    "distributed, bf16": ["train.precision=bf16"],
    "plain": [WHOLE],
    "plain, bf16, Muon": [WHOLE, MUON, "train.precision=bf16"],
}


@pytest.mark.parametrize("name", quick_or_slow(RUNS, ("distributed, bf16", "plain, bf16, Muon")))
def test_a_checkpoint_of_an_unfused_adam_resumes_fused_and_to_the_bit(
    pretrain: Command, name: str
) -> None:
    """Older groups contain ``fused: None``, which torch would load unchanged.

    The two forms differ by rounding, so the state itself comes from a fused one.
    """
    pretrain(*RUNS[name])
    wanted = losses(pretrain.run_dir)
    step = pretrain.checkpoints / "step_00000004"
    back_to(pretrain.run_dir, 4)
    common = read_common(step)
    for group in groups_of(common["optimizer"]):
        assert group["fused"] is True
        group["fused"] = None
    torch.save(common, step / "common.pt")

    def recorded(manifest: dict[str, Any]) -> None:
        manifest["files"]["common.pt"] = (step / "common.pt").stat().st_size
        manifest["sha256"]["common.pt"] = sha256(step / "common.pt")

    edit(step / MANIFEST, recorded)
    assert "at step 4" in pretrain(*RUNS[name])
    assert losses(pretrain.run_dir) == wanted
    last = groups_of(read_common(pretrain.checkpoints / "step_00000012")["optimizer"])
    assert len(last) > 1 and all(group["fused"] is True for group in last)


def test_steps_are_on_their_parameters_device() -> None:
    """Holds for every optimizer, new or loaded; ``meta`` represents a GPU, on which the fused form
    reads the steps.
    """
    from pretrain.engines.megatron import _SplitState
    from pretrain.engines.muon import Muon
    from pretrain.engines.zero_state import ZeroState

    def weight() -> Tensor:
        return torch.zeros(3, device="meta", requires_grad=True)

    loaded = torch.optim.AdamW([weight()])
    loaded.state[loaded.param_groups[0]["params"][0]] = {"step": torch.tensor(5.0)}
    fuse(loaded)
    split: Any = object.__new__(_SplitState)
    split.adam = torch.optim.AdamW([weight()], fused=True)
    split.adam.state[split.adam.param_groups[0]["params"][0]] = {}
    split.optimizer = SimpleNamespace(init_state_fn=lambda adam, config: None, config=None)
    split._prepare()
    groups: list[dict[str, Any]] = [
        {"params": [weight()]},
        {"params": [weight()], "muon": True, "fused": None},
    ]
    muon = Muon(groups, OptimizerConfig(name="muon"), torch.float32)
    muon.prepare()
    for adam in (loaded, split.adam, muon):
        steps = [state["step"] for state in adam.state.values()]
        assert steps
        assert {(step.device.type, step.dtype) for step in steps} == {("meta", torch.float32)}
        assert all(settings["fused"] for settings in (adam.defaults, *adam.param_groups))
    flat = weight()
    inner = SimpleNamespace(optimizer=torch.optim.AdamW([flat], fused=True))
    zero: Any = object.__new__(ZeroState)
    zero.stage, zero.engine = 1, SimpleNamespace(optimizer=inner)
    assert zero._step(2.0, flat).is_meta


def test_other_optimizers_are_left_alone() -> None:
    """FusedAdam of Transformer Engine and apex is not a torch.optim.Adam and has no such key."""
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    fuse(other)
    fuse(None)  # None: the optimizer of a rank without parameters
    assert other.param_groups[0]["fused"] is None


def test_an_element_s_update_does_not_depend_on_where_a_tensor_is_cut() -> None:
    """Copies of a tied embedding on two pipeline stages may be split differently over their ranks.

    The update is equal bit for bit if splits are at multiples of 16 elements, including empty
    parts. Megatron's are: a parameter begins at a multiple of 64, a rank's share at one of 128 /
    ranks (param_and_grad_buffer.py:654 and 665, 0.16.1). torch's CPU kernel rounds the last numel %
    16 elements differently.
    """
    size = 4099
    piece = 16
    steps = 20
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(size, generator=generator)
    gradients = torch.randn(steps, size, generator=generator)
    found = []
    for cuts in ([0, size], [0, *range(0, size, piece), size]):
        spans = list(itertools.pairwise(cuts))
        parts = [weights[begin:end].clone().requires_grad_() for begin, end in spans]
        adam = torch.optim.AdamW(parts, lr=1e-2, fused=True)
        for gradient in gradients:
            for part, (begin, end) in zip(parts, spans, strict=True):
                part.grad = gradient[begin:end]
            adam.step()
        found.append(torch.cat([part.detach() for part in parts]))
        found.append(torch.cat([adam.state[part]["exp_avg_sq"] for part in parts]))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def updates_on_a_gpu() -> dict[str, dict[str, float]]:
    """Return optimizer -> bytes per parameter that the kernels of a bf16 step on an H100 move, by
    kernel.
    """
    from pretrain.rehearsal.steps import rehearse

    upstream.import_megatron()
    cases = {"distributed": [], "plain": [WHOLE], "Muon": [MUON], "ZeRO-1": deepspeed(1)}
    found: dict[str, dict[str, float]] = {}
    for name, more in cases.items():
        one = ["train.global_batch_size=2", "optimizer.clip_grad=0"]
        report = rehearse(config_of(1, [*PLAIN, *one, *more], ON_A_GPU), 1, "h100")
        found[name] = {}
        for each in report.ranks[0].trace.launches:
            moved = found[name].get(each.name, 0.0)
            found[name][each.name] = moved + each.bytes / report.plan.total_parameters
    return found


def test_on_a_gpu_adam_is_one_kernel_and_a_step_moves_what_the_benchmark_s_model_states(
    tmp_path: Path,
) -> None:
    from tools.bench.traffic.paper import OPTIMIZER_BYTES

    found = answer(1, updates_on_a_gpu, output=tmp_path / "out")
    for name, kernels in found.items():
        assert "_fused_adamw_" in kernels, name
        assert not [
            kernel for kernel in kernels if kernel.startswith(("_foreach_lerp", "_foreach_addc"))
        ]
    # The schema of the operation marks the gradient as written, too (4 bytes), but it writes the
    # gradient only when it unscales it.
    counted = {
        "zero_": 4.0,
        "add_": 10.0,
        "mul_": 8.0,
        "_foreach_norm": 4.0,
        "_fused_adamw_": 32.0,
        "copy_": 6.0,
    }
    for name in ("distributed", "plain"):
        moved = {kernel: found[name][kernel] for kernel in counted}
        # The tolerance covers the padding of the buffers and small tensors.
        assert moved == pytest.approx(counted, rel=0.01), name
    assert sum(OPTIMIZER_BYTES.values()) == sum(counted.values()) - 4
