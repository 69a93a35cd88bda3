"""Modules of the demo's training and export commands, which fork from a process with these modules.

`tools.demo.shell.Shell.serve` starts that process. pyarrow is not among them, since it starts a
thread.
"""

from __future__ import annotations

from pretrain.processes import check_one_thread, import_trainer

import_trainer(
    (
        "fem_megatron.mixers.attention.layer",
        "fem_megatron.mixers.fem.layer",
        "tools.diagnose.from_checkpoint",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
    )
)
check_one_thread()
