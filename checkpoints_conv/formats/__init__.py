"""Checkpoint files: safetensors folders and torch distributed checkpoints; read, planned, written."""
