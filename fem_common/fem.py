"""``fem COMMAND ...``: one installed command for all commands of this project.

``fem data run ...`` is ``python -m data_prep run ...``. The module uses only the standard library.
"""

from __future__ import annotations

import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from fem_common.cli import Parser
from fem_common.text import aligned

# Command -> its module, one line of help.
COMMANDS = {
    "demo": ("tools.demo", "text in, a Hugging Face model out, on this machine"),
    "data": ("data_prep", "tokenize text into Megatron's .bin/.idx files"),
    "pretrain": ("pretrain", "train a model, print its plan, or check its configuration"),
    "curves": ("tools.curves", "draw losses, gradient norms and speeds of runs"),
    "generate": ("tools.generate", "continue a prompt with a checkpoint or an export"),
    "evaluate": ("tools.evaluate", "score checkpoints with a suite of tasks"),
    "hf": ("tools.hf", "export to Hugging Face format, import, compare"),
    "checkpoint": ("tools.checkpoint", "show, verify, convert and merge checkpoints"),
    "launch": ("launch", "run any command as a Slurm job or a local job"),
    "scaling": ("tools.scaling", "plan, run and fit scaling-law studies"),
    "layout": ("tools.layout", "search the fastest parallel layout of a run"),
    "tokens": ("tools.tokens", "print the documents that a step read"),
    "diagnose": ("tools.diagnose", "draw energies and norms of a checkpoint's layers"),
    "papers": ("tools.papers", "run the experiments of the papers"),
    "kernels": ("kernels", "list the kernels and their implementations"),
    "kernel_gate": ("tools.kernel_gate", "compile the kernels without a GPU"),
}


def main() -> None:
    """Run the module of the command in ``sys.argv`` as its own ``python -m`` would."""
    rows = aligned([[f"  {name}", purpose] for name, (_, purpose) in COMMANDS.items()])
    parser = Parser(
        prog="fem",
        usage="fem COMMAND ... | fem COMMAND --help",
        description="Pretrain energy-based transformers.\n\ncommands:\n" + "\n".join(rows),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the above")
    name = parser.parse_args(sys.argv[1:2]).command
    del sys.argv[1]
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)


def command_line(name: str, *words: object) -> str:
    """Return a shell command that runs ``fem name words...`` from the current folder.

    It is ``python -m MODULE words...`` if this environment has no ``fem``.
    """
    python = Path(sys.executable)
    program = python.with_name("fem")
    start: list[Any] = [program, name] if program.exists() else [python, "-m", COMMANDS[name][0]]
    if shutil.which(start[0].name) == str(start[0]):
        start[0] = start[0].name
    elif start[0].is_relative_to(Path.cwd()):
        start[0] = start[0].relative_to(Path.cwd())
    return shlex.join(map(str, [*start, *words]))


def next_steps(*commands: str) -> str:
    """Return the last lines of a finished command: the commands that a user may run next."""
    return "\n".join(["Next:", *(f"  {command}" for command in commands)])
