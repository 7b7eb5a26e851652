"""Megatron-based reinforcement learning for teams of LLM agents (Dr. MAS, arXiv 2602.08847)."""

__version__ = "0.1.0"
