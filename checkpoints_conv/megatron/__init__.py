"""Live Megatron models: built, loaded, exported, run."""
