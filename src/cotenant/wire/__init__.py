"""Typed messages between the API process and the worker, and the ZeroMQ channel that carries them."""
