"""An NVIDIA GPU."""
