"""Hugging Face <-> Megatron-Core checkpoints: one mapping, used by the converter, the actors and weight sync.

`families` holds one declarative table per model family, `mapping` turns a table and a config into names and tensors,
`load` and `export` apply it to a live model, `python -m checkpoints_conv` applies it to files.
"""
