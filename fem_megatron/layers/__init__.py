"""One file a mixer or sub-layer: Megatron-core modules, tensor-parallel from birth. No model, no trainer may come in."""
