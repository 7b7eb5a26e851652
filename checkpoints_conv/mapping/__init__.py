"""Names and shapes of one model on both sides: Hugging Face and Megatron."""
