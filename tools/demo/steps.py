"""The five steps of the demo: their commands, their order, and the checks of their results."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fem_common.files import sha256_json
from pretrain.config import RunConfig, load_run
from pretrain.report.history import History
from tools.demo import report
from tools.demo.report import NAMES, checkpoint_step, largest_difference
from tools.demo.shell import DemoError, Shell, print_now, terminate_children

VOCABULARY, VALID_PERCENT = 4096, "10"
RECIPES = {"fem": "demo", "transformer": "demo_transformer"}  # model -> file in configs/run
STOPPED_LAYOUT = "TP 2 x PP 2 with sequence parallelism, 4 ranks"
RESUMED_LAYOUT = "TP 1 x PP 1, DP 2 with the distributed optimizer, 2 ranks"
SPLIT = [
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.sequence_parallel=true",
]
DISTRIBUTED = "parallel.use_distributed_optimizer=true"
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

    def path(self, *parts: str) -> str:
        """Return a path below the output folder, in the form for a command line."""
        return self.shell.shown(self.out.joinpath(*parts))

    def run(self, what: str, *command: str) -> None:
        """Run a short command. what: its description for error messages."""
        self.shell.run(command, what, COMMAND_LIMIT)

    def data_prep(self, what: str, *arguments: str) -> None:
        """Run ``python -m data_prep`` with ``arguments``. what: see `run`."""
        self.run(what, self.shell.python, "-m", "data_prep", *arguments)

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
        torchrun: bool = False,
        watch: Callable[[int], None] | None = None,
    ) -> None:
        """Run ``pretrain`` with ``ranks`` ranks for the run directory ``name``.

        what: description of the command for error messages.
        arguments: additional overrides.
        torchrun: start the ranks with torchrun, otherwise with ``--processes``.
        watch: see `Shell.run`.
        """
        recipe = RECIPES.get(name, RECIPES["fem"])
        count = ("--nproc-per-node" if torchrun else "--processes", str(ranks))
        launcher = [*self.shell.torchrun, *count] if torchrun else [self.shell.python]
        settings = (*self.overrides(name), *self.settings, *arguments)
        command = [*launcher, "-m", "pretrain", f"configs/run/{recipe}.yaml", *settings]
        self.shell.run(command if torchrun else [*command, *count], what, TRAINING_LIMIT, watch)

    def pretrain_and_stop(self, what: str, name: str, after: int) -> int:
        """Train with the SPLIT layout and send the workers SIGTERM after step ``after``.

        Return the step of the checkpoint that they write.
        """
        signalled: list[int] = []

        def watch(launcher: int) -> None:
            if not signalled and History.read(self.out / name).last_step >= after:
                print_now(f"  $ pkill -TERM -P {launcher}")
                signalled.append(launcher)
                terminate_children(launcher)

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
        there = set(os.listdir(self.out)) if self.out.is_dir() else set()
        if there and not there & {"corpus", "tokenizer", "data", *PRODUCTS}:
            raise DemoError(
                f"{self.out} is not empty and not from an earlier demo: choose another --out"
            )
        old = [self.path(name) for name in PRODUCTS if name in there]
        if old:
            self.run("deleting the earlier demo", "rm", "-rf", *old)
        corpus, tokenizer = self.path("corpus", "stdlib.parquet"), self.path("tokenizer")
        data, again = self.path("data"), "--overwrite"
        self.data_prep("gathering text", "stdlib", corpus, again)
        vocabulary = ("--vocab-size", str(VOCABULARY), "--out", tokenizer)
        self.data_prep("training the tokenizer", "train-tokenizer", corpus, *vocabulary, again)
        split = ("--tokenizer", tokenizer, "--out", data, "--valid-percent", VALID_PERCENT)
        self.data_prep("encoding", "run", corpus, *split, again)
        data_prep = [self.shell.python, "-m", "data_prep"]
        stats = [*data_prep, "stats", data, "--picture", self.path("lengths.png")]
        commands = {"checking the data": [*data_prep, "verify", data], "counting": stats}
        chat = "configs/data/chat"
        if (self.shell.root / f"{chat}.jsonl").is_file():
            commands["encoding conversations"] = [
                *(*data_prep, "run", f"{chat}.jsonl", "--messages", "--tokenizer", tokenizer),
                *("--chat-template", f"{chat}_template.jinja", "--out", self.path("chat")),
                *("--valid-percent", VALID_PERCENT, "--test-percent", "0", again),
            ]
        self.shell.together(commands, COMMAND_LIMIT)

    def pretrain_until_sigterm(self) -> None:
        """Train FEM on four ranks and stop it before its end."""
        print_now(
            f"  layout: {STOPPED_LAYOUT}; SIGTERM to the workers about step {self._stop_step} "
            f"of {self.config.train.steps}"
        )
        self.stopped_at = self.pretrain_and_stop("pretraining", "fem", self._stop_step)
        print_now(f"  stopped by SIGTERM, exit code 0, checkpoint of step {self.stopped_at}")

    @property
    def _stop_step(self) -> int:
        return max(1, round(STOP_AT * (self.config.train.steps or 0)))

    def resume_elsewhere(self) -> None:
        """Resume the run with another layout and train it to its end; compare its first losses.

        They are compared with the losses of a copy that continues with the old layout for a few
        steps.
        """
        print_now(
            f"  first a copy continues at the old layout ({STOPPED_LAYOUT}), to compare with:"
        )
        self.run("copying the run", "cp", "-r", self.path("fem"), self.path("fem_same_layout"))
        self.pretrain_and_stop(
            "continuing the copy", "fem_same_layout", self.stopped_at + COMPARED_STEPS
        )
        print_now(f"  now the run itself, at another layout ({RESUMED_LAYOUT}), to its end:")
        self.pretrain("resuming", "fem", 2, DISTRIBUTED, torchrun=True)
        resumed, copy = (
            History.read(self.out / name).part(after=self.stopped_at)
            for name in ("fem", "fem_same_layout")
        )
        if resumed.last_step != self.config.train.steps:
            raise DemoError(
                f"resuming: the run ended at step {resumed.last_step} of {self.config.train.steps}"
            )
        new, old = resumed.losses(), copy.losses()
        steps, difference = self.resume = largest_difference(new, old)
        print_now(f"  the next {steps} losses at both layouts:")
        for step in sorted(new.keys() & old.keys()):
            print_now(
                f"    step {step}: {old[step]:.7f} at the old layout, "
                f"{new[step]:.7f} at the new one"
            )
        print_now(
            f"  largest relative difference {difference:.1e} (allowed {RESUME_TOLERANCE:.0e})"
        )
        if difference > RESUME_TOLERANCE:
            raise DemoError(
                f"resuming: the losses after the resume differ by {difference:.1e} "
                "from those without it"
            )
        self.run("naming the model", "ln", "-s", "fem/checkpoints", self.path("checkpoints"))
        print_now(f"  every tool now accepts {self.shell.shown(self.out)} as this model")

    def twin(self) -> None:
        """Train the Transformer with the same budget and the same layout as the resumed run."""
        self.pretrain("pretraining the Transformer", "transformer", 2, DISTRIBUTED)

    def export(self) -> None:
        """Export both models to Hugging Face's format and compare their logits with Megatron's.

        The exports and comparisons run in separate processes, several at once.
        """
        python = self.shell.python
        check, valid = self.path("check"), self.path("data", "valid.bin")
        length = ("--length", str(self.config.data.seq_length))
        models = [self.path(name) for name in NAMES]
        export = (python, "-m", "tools.hf", "export")
        commands = {
            f"exporting {name}": [*export, self.path(name), self.path("hf", name)] for name in NAMES
        }
        logits = [python, "-m", "tools.demo.megatron_logits", check, valid, *models, *length]
        commands["Megatron's logits"] = logits
        self.shell.together(commands, COMMAND_LIMIT)
        stock = {}
        for name in NAMES:
            files = ("--megatron-logits", f"{check}/{name}.npy", "--out", f"{check}/{name}.json")
            script = (python, "tools/demo/stock_transformers.py", self.path("hf", name))
            stock[f"stock transformers of {name}"] = [*script, "--tokens", valid, *length, *files]
        self.shell.together(stock, COMMAND_LIMIT)
        for name in NAMES:
            file = self.out / "check" / f"{name}.json"
            found = self.models[name] = json.loads(file.read_text())
            for key, what in (
                ("logit_difference", "to Megatron's logits"),
                ("cache_difference", "between generating with and without cache"),
            ):
                if not found[key] < LOGIT_TOLERANCE:
                    raise DemoError(
                        f"{name}: the difference {what} is {found[key]:.1e}, "
                        f"allowed is {LOGIT_TOLERANCE:.0e}"
                    )

    def evaluate(self) -> None:
        """Evaluate both models with the quick suite."""
        models = [self.path("fem"), self.path("transformer")]
        out = ("--out", self.path("evaluation"))
        command = [self.shell.python, "-m", "tools.evaluate", *models, "--suite", "quick", *out]
        self.shell.run(command, "evaluating", TRAINING_LIMIT)

    def findings(self) -> dict[str, Any]:
        """Return all measurements as the contents of ``report.json``."""
        data = self.out / "data"
        manifest = json.loads((data / "manifest.json").read_text())
        valid = manifest["splits"]["valid"]
        vocabulary = manifest["tokenizer"]["vocab_size"]
        entropy = report.unigram_entropy(data / "valid.bin", vocabulary)
        models = {}
        for name, start in (("fem", self.stopped_at), ("transformer", 0)):
            history = History.read(self.out / name).part(after=start)
            models[name] = report.model_findings(self.models[name], history, valid)
        steps, difference = self.resume
        parity: dict[str, Any] = {
            "resume_steps": steps,
            "resume_relative_loss_difference": difference,
        }
        for key in ("logit_difference", "cache_difference"):
            parity[key] = {name: self.models[name][key] for name in NAMES}
        train, seq_length = self.config.train, self.config.data.seq_length
        return {
            "format": 1,
            "models": models,
            "unigram": {
                "heldout_entropy": entropy,
                "bits_per_byte": report.bits_per_byte(entropy, valid),
            },
            "parity": parity,
            "run": {
                "steps": train.steps,
                "stopped_at": self.stopped_at,
                "batch_tokens": train.global_batch_size * seq_length,
                "seq_length": seq_length,
                "configuration": configuration_hash(self.shell.root, self.settings),
                "stopped_layout": STOPPED_LAYOUT,
                "resumed_layout": RESUMED_LAYOUT,
            },
            "data": manifest["splits"],
            "machine": machine(),
        }


def configuration_hash(root: Path, settings: Sequence[str] = ()) -> str:
    """Return a hash of everything that determines what both models learn, except the text.

    root: folder of the checkout. settings: the user's section.key=value.
    """
    from tools.scaling.verbs.collect import learning_settings  # late: imports pandas

    # A new key with a default changes no run, so values that equal the defaults are left out.
    defaults = learning_settings(RunConfig())
    recipes = []
    for name in RECIPES.values():
        config = load_run(root / "configs" / "run" / f"{name}.yaml", settings)
        values = learning_settings(config)
        recipes.append({key: value for key, value in values.items() if value != defaults.get(key)})
    return sha256_json([recipes, VALID_PERCENT, VOCABULARY])[:12]


def _yaml(text: str) -> str:
    """Return a path as the value of an override, quoted if YAML could read it otherwise."""
    return text if re.fullmatch(r"/?[A-Za-z][\w./-]*", text) else json.dumps(text)


def machine() -> dict[str, Any]:
    """Return the facts of the machine and the versions of the packages for ``report.json``."""
    return {
        "cores": os.cpu_count(),
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
    demo.shell.serve("tools.demo.preloaded")  # imports while the data are prepared
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
        print_now(
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
