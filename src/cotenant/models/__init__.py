"""The decoder for the Llama family, attention, LoRA, and the loading of weights."""
