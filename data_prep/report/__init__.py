"""Reports on inputs and data folders."""
