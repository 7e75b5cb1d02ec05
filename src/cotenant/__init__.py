"""cotenant: online requests and LoRA fine-tuning on one device, within the requests' latency targets."""

__version__ = "0.1.0"
