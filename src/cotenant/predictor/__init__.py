"""How long the next iteration will take: measured records first, a linear model fitted to them behind (pure)."""
