"""Which layout of a run on so many GPUs would be fastest, by a stated model of a step. Modelled, not measured; no torch."""
