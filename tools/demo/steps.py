"""The five steps of the demo: their commands, their order, and the checks of their results."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pretrain.config import RunConfig
from tools.demo import report
from tools.demo.report import History, checkpoint_step, largest_difference
from tools.demo.shell import DemoError, Shell, say, terminate_children

VOCABULARY = 4096
PROMPT = "def read(self"
STOPPED_LAYOUT = "TP 2 x PP 2 with sequence parallelism, 4 ranks"
RESUMED_LAYOUT = "TP 1 x PP 1, DP 2 with the distributed optimizer, 2 ranks"
SPLIT = [
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.sequence_parallel=true",
]
# Share of the run's steps. It is small because this layout is slower: four ranks share two cores.
STOP_AT = 0.25
COMPARED_STEPS = 3
LOGIT_TOLERANCE = 1e-4  # absolute, fp32: the same sums in another order
# Relative, fp32: sums in another order, through COMPARED_STEPS updates; 1e-8 is usual.
RESUME_TOLERANCE = 1e-6
TRAINING_LIMIT, COMMAND_LIMIT = 3600.0, 600.0  # seconds; about ten times what two slow cores need
PRODUCTS = (
    "fem",
    "fem_same_layout",
    "transformer",
    "checkpoints",
    "hf",
    "check",
    "evaluation",
    "lengths.png",
    "report.json",
    "report.png",
)


@dataclass
class Demo:
    """State of one demo: its output folder and its results so far.

    config: configuration of the FEM run.
    stopped_at: step of the checkpoint at which the FEM run was stopped.
    seconds: step of the demo -> its duration.
    """

    shell: Shell
    out: Path
    config: RunConfig
    settings: tuple[str, ...] = ()  # the user's section.key=value, for every run
    stopped_at: int = 0
    # Compared steps, largest relative difference of their losses.
    resume: tuple[int, float] = (0, 0.0)
    # Name of the model -> results of stock_transformers.
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])

    def path(self, *parts: str) -> str:
        """Return a path below the output folder, in the form for a command line."""
        return self.shell.shown(self.out.joinpath(*parts))

    def python(self, what: str, *arguments: str) -> None:
        """Run this interpreter with ``arguments``.

        what: description of the command for error messages.
        """
        self.shell.run([self.shell.python, *arguments], what, COMMAND_LIMIT)

    def overrides(self, name: str) -> list[str]:
        """Return the ``section.key=value`` overrides of the run ``name``.

        They set the run directory and, unless the output folder is the default, the paths of the
        data.
        """
        run_dir = f"run_dir={_yaml(self.path(name))}"
        if self.out == self.shell.root / "runs" / "demo":
            return [run_dir]
        data = [
            f"data.{split}.0.prefix={_yaml(self.path('data', split))}"
            for split in ("train", "valid", "test")
        ]
        return [run_dir, *data]

    def pretrain(
        self,
        what: str,
        name: str,
        ranks: int,
        *arguments: str,
        watch: Callable[[int], None] | None = None,
    ) -> None:
        """Run ``pretrain`` under torchrun with ``ranks`` ranks for the run directory ``name``.

        what: description of the command for error messages.
        arguments: additional overrides.
        watch: see `Shell.run`.
        """
        recipe = (
            "configs/run/demo_transformer.yaml"
            if name == "transformer"
            else "configs/run/demo.yaml"
        )
        settings = (*self.overrides(name), *self.settings, *arguments)
        self.shell.run(
            [
                *self.shell.torchrun,
                "--nproc-per-node",
                str(ranks),
                "-m",
                "pretrain",
                recipe,
                *settings,
            ],
            what,
            TRAINING_LIMIT,
            watch,
        )

    def pretrain_and_stop(self, what: str, name: str, after: int) -> int:
        """Train with the SPLIT layout and send the workers SIGTERM after step ``after``.

        Return the step of the checkpoint that they write.
        """
        signalled: list[int] = []

        def watch(torchrun: int) -> None:
            if not signalled and History.read(self.out / name).last_step >= after:
                say(f"  $ pkill -TERM -P {torchrun}")
                signalled.append(torchrun)
                terminate_children(torchrun)

        self.pretrain(what, name, 4, *SPLIT, watch=watch)
        total = self.config.train.steps or 0
        step = checkpoint_step(self.out / name)
        if not signalled or not after <= step < total:
            raise DemoError(
                f"{what}: the run should stop after step {after} of {total}, "
                f"but its last checkpoint is of step {step}"
            )
        return step

    def prepare_data(self) -> None:
        """Write the standard library's text, a tokenizer and .bin/.idx files, and verify them.

        Before that, delete the products of an earlier demo in the output folder.
        """
        known = {"corpus", "tokenizer", "data", *PRODUCTS}
        if (
            self.out.is_dir()
            and any(self.out.iterdir())
            and not any((self.out / name).exists() for name in known)
        ):
            raise DemoError(
                f"{self.out} is not empty and not from an earlier demo: choose another --out"
            )
        old = [self.path(name) for name in PRODUCTS if os.path.lexists(self.out / name)]
        if old:
            self.shell.run(["rm", "-rf", *old], "deleting the earlier demo", COMMAND_LIMIT)
        corpus = self.path("corpus", "stdlib.parquet")
        tokenizer = self.path("tokenizer")
        data = self.path("data")
        prepare = ("-m", "data_prep")
        self.python("gathering text", *prepare, "stdlib", corpus, "--overwrite")
        vocabulary = ("--vocab-size", str(VOCABULARY))
        self.python(
            "training the tokenizer",
            *prepare,
            "train-tokenizer",
            corpus,
            *vocabulary,
            "--out",
            tokenizer,
            "--overwrite",
        )
        self.python(
            "encoding",
            *prepare,
            "run",
            corpus,
            "--tokenizer",
            tokenizer,
            "--out",
            data,
            "--valid-percent",
            "10",
            "--overwrite",
        )
        python = [self.shell.python, *prepare]
        stats = [*python, "stats", data, "--picture", self.path("lengths.png")]
        self._together({"checking the data": [*python, "verify", data], "counting": stats})

    def pretrain_until_sigterm(self) -> None:
        """Train FEM on four ranks and stop it before its end."""
        say(
            f"  layout: {STOPPED_LAYOUT}; SIGTERM to the workers about step {self._stop_step} "
            f"of {self.config.train.steps}"
        )
        self.stopped_at = self.pretrain_and_stop("pretraining", "fem", self._stop_step)
        say(f"  stopped by SIGTERM, exit code 0, checkpoint of step {self.stopped_at}")

    @property
    def _stop_step(self) -> int:
        return max(1, round(STOP_AT * (self.config.train.steps or 0)))

    def resume_elsewhere(self) -> None:
        """Resume the run with another layout and train it to its end; compare its first losses.

        They are compared with the losses of a copy that continues with the old layout for a few
        steps.
        """
        say(f"  first a copy continues at the old layout ({STOPPED_LAYOUT}), to compare with:")
        self.shell.run(
            ["cp", "-r", self.path("fem"), self.path("fem_same_layout")],
            "copying the run",
            COMMAND_LIMIT,
        )
        self.pretrain_and_stop(
            "continuing the copy", "fem_same_layout", self.stopped_at + COMPARED_STEPS
        )
        say(f"  now the run itself, at another layout ({RESUMED_LAYOUT}), to its end:")
        self.pretrain("resuming", "fem", 2, "parallel.use_distributed_optimizer=true")
        after = History.read(self.out / "fem").part(after=self.stopped_at)
        same = History.read(self.out / "fem_same_layout").part(after=self.stopped_at)
        if after.last_step != self.config.train.steps:
            raise DemoError(
                f"resuming: the run ended at step {after.last_step} of {self.config.train.steps}"
            )
        steps, difference = self.resume = largest_difference(after.losses(), same.losses())
        say(f"  the next {steps} losses at both layouts:")
        for step in sorted(after.losses().keys() & same.losses().keys()):
            say(
                f"    step {step}: {same.losses()[step]:.7f} at the old layout, "
                f"{after.losses()[step]:.7f} at the new one"
            )
        say(f"  largest relative difference {difference:.1e} (allowed {RESUME_TOLERANCE:.0e})")
        if difference > RESUME_TOLERANCE:
            raise DemoError(
                f"resuming: the losses after the resume differ by {difference:.1e} "
                "from those without it"
            )
        self.shell.run(
            ["ln", "-s", "fem/checkpoints", self.path("checkpoints")],
            "naming the model",
            COMMAND_LIMIT,
        )
        say(f"  every tool now accepts {self.shell.shown(self.out)} as this model")

    def twin(self) -> None:
        """Train the Transformer with the same budget and the same layout as the resumed run."""
        self.pretrain(
            "pretraining the Transformer",
            "transformer",
            2,
            "parallel.use_distributed_optimizer=true",
        )

    def export(self) -> None:
        """Export both models to Hugging Face's format and compare their logits with Megatron's.

        The exports and comparisons run in separate processes, several at once.
        """
        valid = self.path("data", "valid.bin")
        length = ("--length", str(self.config.data.seq_length))
        names = ("fem", "transformer")
        python, check = self.shell.python, self.path("check")
        exports = {
            f"exporting {name}": [
                python,
                "-m",
                "tools.hf",
                "export",
                self.path(name),
                self.path("hf", name),
            ]
            for name in names
        }
        ours = [
            python,
            "-m",
            "tools.demo.megatron_logits",
            check,
            valid,
            *(self.path(name) for name in names),
            *length,
        ]
        self._together({**exports, "Megatron's logits": ours})
        given = ("--tokens", valid, *length, "--prompt", PROMPT)
        files = {
            name: ("--megatron-logits", f"{check}/{name}.npy", "--out", f"{check}/{name}.json")
            for name in names
        }
        stock = {
            name: [
                python,
                "tools/demo/stock_transformers.py",
                self.path("hf", name),
                *given,
                *files[name],
            ]
            for name in names
        }
        self._together(
            {f"stock transformers of {name}": command for name, command in stock.items()}
        )
        for name in names:
            found = self.models[name] = json.loads(
                (self.out / "check" / f"{name}.json").read_text()
            )
            for key, what in (
                ("logit_difference", "to Megatron's logits"),
                ("cache_difference", "between generating with and without cache"),
            ):
                if not found[key] < LOGIT_TOLERANCE:
                    raise DemoError(
                        f"{name}: the difference {what} is {found[key]:.1e}, "
                        f"allowed is {LOGIT_TOLERANCE:.0e}"
                    )

    def _together(self, commands: dict[str, list[str]]) -> None:
        """Run several commands at once.

        commands: description for error messages -> command.
        """
        self.shell.together([(command, what) for what, command in commands.items()], COMMAND_LIMIT)

    def evaluate(self) -> None:
        """Evaluate both models with the quick suite."""
        models = [self.path("fem"), self.path("transformer")]
        out = ("--out", self.path("evaluation"))
        command = [self.shell.python, "-m", "tools.evaluate", *models, "--suite", "quick", *out]
        self.shell.run(command, "evaluating", TRAINING_LIMIT)

    def findings(self) -> dict[str, Any]:
        """Return all measurements as the contents of ``report.json``."""
        manifest = json.loads((self.out / "data" / "manifest.json").read_text())
        valid = manifest["splits"]["valid"]
        unigram = report.unigram(
            self.out / "data" / "train.bin",
            self.out / "data" / "valid.bin",
            manifest["tokenizer"]["vocab_size"],
        )
        fem, plain = History.read(self.out / "fem"), History.read(self.out / "transformer")
        resumed, stopped = fem.part(after=self.stopped_at), fem.part(up_to=self.stopped_at)
        models = {
            "fem": report.model_findings(self.models["fem"], resumed, valid),
            "transformer": report.model_findings(self.models["transformer"], plain, valid),
        }
        models["fem"] |= {
            "tokens_per_second_stopped_layout": stopped.tokens_per_second(),
            "peak_memory_bytes_stopped_layout": stopped.peak_memory_bytes(),
        }
        found = {
            "format": 1,
            "models": models,
            "unigram": {
                **unigram,
                "bits_per_byte": report.bits_per_byte(unigram["heldout_entropy"], valid),
            },
            "parity": {
                "resume_steps": self.resume[0],
                "resume_relative_loss_difference": self.resume[1],
                "logit_difference": {
                    name: self.models[name]["logit_difference"] for name in models
                },
                "cache_difference": {
                    name: self.models[name]["cache_difference"] for name in models
                },
            },
            "run": {
                "steps": self.config.train.steps,
                "stopped_at": self.stopped_at,
                "batch_tokens": self.config.train.global_batch_size * self.config.data.seq_length,
                "seq_length": self.config.data.seq_length,
                "stopped_layout": STOPPED_LAYOUT,
                "resumed_layout": RESUMED_LAYOUT,
            },
            "data": manifest["splits"],
            "machine": machine(self.load_average),
        }
        return {**found, "verdict": report.verdict(found)}


def _yaml(text: str) -> str:
    """Return a path as the value of an override, quoted if YAML could read it otherwise."""
    return text if re.fullmatch(r"/?[A-Za-z][\w./-]*", text) else json.dumps(text)


def machine(load_average: float) -> dict[str, Any]:
    """Return the facts of the machine and the versions of the packages for ``report.json``."""
    return {
        "cores": os.cpu_count(),
        "load_average_at_start": load_average,
        "python": platform.python_version(),
        **{
            package: metadata.version(package)
            for package in ("torch", "megatron-core", "transformers")
        },
    }


def run(demo: Demo) -> dict[str, Any]:
    """Run all steps and return the contents of ``report.json``.

    Raises:
        DemoError: a step failed.
    """
    started = time.monotonic()
    steps: tuple[tuple[str, str, Callable[[], None]], ...] = (
        (
            "data",
            "the running Python's standard library: parquet, tokenizer, .bin/.idx",
            demo.prepare_data,
        ),
        (
            "pretrain",
            "FEM-softmax over four ranks, stopped by SIGTERM",
            demo.pretrain_until_sigterm,
        ),
        ("resume", "the same run at another layout, to its end", demo.resume_elsewhere),
        (
            "twin",
            "the Transformer of the same budget: same data, same order, same batches, "
            "same schedule",
            demo.twin,
        ),
        (
            "export",
            "both to Hugging Face's format, loaded by stock transformers; the report",
            demo.export,
        ),
    )
    for number, (name, purpose, step) in enumerate(steps, 1):
        begun = time.monotonic()
        say(
            f"\n[{number}/{len(steps)}] {name}: {purpose}   "
            f"({report.minutes(begun - started)} since the start)"
        )
        try:
            step()
        except DemoError as error:
            raise DemoError(f"step {number} ({name}) failed: {error}") from None
        demo.seconds[name] = time.monotonic() - begun
    found = demo.findings()
    found["seconds"] = {**demo.seconds, "total": time.monotonic() - started}
    return found
