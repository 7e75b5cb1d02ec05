"""What bench/render.py makes of each kind of result."""
