"""One folder a mixer: ``shape``, torch-free (its switches and sizes), and ``layer``, its mathematics in torch alone. No Megatron-core."""
