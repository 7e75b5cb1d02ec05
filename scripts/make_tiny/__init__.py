"""Makes the built-in model `tiny`. ``python -m scripts.make_tiny --help`` from the repository's root."""
