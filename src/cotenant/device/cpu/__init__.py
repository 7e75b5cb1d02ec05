"""The CPU: a laptop, and CI."""
