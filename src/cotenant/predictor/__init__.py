"""How long the next iteration will take: measured records, linear models, a prior, the first that knows (pure)."""
