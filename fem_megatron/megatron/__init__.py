"""What makes the layers a Megatron-core model on this machine. No mixer is named here."""
