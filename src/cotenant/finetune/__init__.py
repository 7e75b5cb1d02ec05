"""Suspendable LoRA training: a job as a sequence of tasklets, with checkpoints that resume bit for bit."""
