"""tools.layout: the model of a step against what others have published, and by hand; the part that it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config import RunConfig, load_run
from pretrain.plan.run_plan import flops_per_token, make_plan
from tools.bench.traffic.__main__ import PAGE
from tools.layout.__main__ import main
from tools.layout.step import Machine, machines, mfu, seconds

RUN = "configs/run/transformer_1.3b_100bt.yaml"
H100 = 989e12
LLAMA3 = ("data.seq_length=8192", "model.num_query_groups=8", "train.recompute=full")
SPLIT = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
# Name -> GPUs, sizes, published tokens a second and GPU or MFU. OLMo-core's and torchtitan's own pages, Megatron-LM's README; the widths of
# Megatron's two are assumed, and torchtitan's GPU was held at 500 W.
PUBLISHED = {
    "OLMo-core 1B": (8, {"size": (2048, 16, 16, 8192, 100352), "micro": 4, "batch": 512}, 55_000),
    "OLMo-core 7B": (64, {"size": (4096, 32, 32, 11008, 100352), "micro": 1, "batch": 1024}, 10_000),
    "torchtitan 8B": (8, {"size": (4096, 32, 32, 14336, 128256), "micro": 1, "batch": 8, "more": LLAMA3}, 6_667),
    "Megatron 1.7B": (48, {"size": (2304, 24, 24, 9216, 50304), "micro": 4, "batch": 192}, 0.41),
    "Megatron 7.1B": (96, {"size": (4096, 32, 32, 16384, 50304), "micro": 2, "batch": 192, "more": SPLIT}, 0.47),
}  # fmt: skip


def config_of(gpus: int, size: tuple[int, ...], micro: int, batch: int, more: tuple[str, ...] = ()) -> RunConfig:
    names = ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size", "vocab_size")
    sizes = [f"model.{name}={value}" for name, value in zip(names, size, strict=True)]
    batches = [f"train.micro_batch_size={micro}", f"train.global_batch_size={batch}", f"parallel.world_size={gpus}"]
    return load_run(RUN, [*sizes, *batches, *more])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_modelled_mfu_is_within_fifteen_points_of_what_others_have_published(name: str) -> None:
    gpus, sizes, published = PUBLISHED[name]
    config = config_of(gpus, **sizes)  # type: ignore[arg-type]
    plan = make_plan(config, gpus)
    modelled = mfu(plan, sum(seconds(plan, Machine.of("h100", "ib-400")).values()), "h100")
    theirs = published if published < 1 else published * flops_per_token(config) / H100
    assert abs(modelled - theirs) < 0.15, f"{modelled:.3f}, published {theirs:.3f}"
    assert modelled > theirs  # nothing of theirs that is slow for reasons of its own is in it


def test_the_traffic_is_the_page_s() -> None:
    """Pointwise KiB and launches of both passes."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    page = {row[0]: [int(row[1]) + int(row[4]), int(row[3]) + int(row[6])] for row in rows if len(row) == 11 and row[1].isdigit()}
    known = machines()["traffic"]
    assert known == {name: page[name] for name in known} and set(page) - set(known) == {"GLA"}


def test_a_step_by_hand() -> None:
    config = config_of(
        32, (2048, 8, 16, 8192, 32000), 1, 64, ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=4")
    )
    machine = Machine.of("h100", "ib-400")
    spent = seconds(make_plan(config, 32), machine)
    # DP 4: 16 micro-batches. Two layers a stage, four all-reduces each of 4096 x 2048 bf16, of which a rank of two sends and gets a whole.
    assert spent["tensor parallel"] == pytest.approx(16 * 2 * 4 * (2 * 4096 * 2048 / 360e9 + 10e-6))
    work = sum(spent[name] for name in ("products", "attention", "pointwise", "gaps", "tensor parallel"))
    assert spent["bubble"] == pytest.approx(3 / 16 * work)
    deeper = replace(config, parallel=replace(config.parallel, virtual_pipeline_model_parallel_size=2))
    assert seconds(make_plan(deeper, 32), machine)["bubble"] == pytest.approx(spent["bubble"] / 2)
    wide = config_of(64, (2048, 8, 16, 8192, 32000), 1, 64)  # over several nodes
    alike, slower = (seconds(make_plan(wide, 64), each) for each in (machine, replace(machine, fabric=1e8)))
    assert slower["data parallel"] > alike["data parallel"] and slower["products"] == alike["products"]


def test_the_best_is_written_as_a_part_that_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part, picture = tmp_path / "best.yaml", tmp_path / "best.png"
    small = ["model.num_layers=2", "train.global_batch_size=8", "model.vocab_size=32000"]
    assert main([RUN, *small, "--gpus", "4", "--out", str(part), "--picture", str(picture)]) == 0
    assert "modelled" in capsys.readouterr().out
    taken = load_run(RUN, [*small, f"parallel={part}"])
    assert taken.parallel.world_size == 4 and taken.parallel.overlap_grad_reduce
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([RUN, *small, "--gpus", "3"]) == 2
