"""Generation: sequences, their pages, the batch of each iteration, and the sampler."""
