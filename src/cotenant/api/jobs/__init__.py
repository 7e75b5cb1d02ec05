"""Fine-tuning jobs on the API's side: from a request to a stored job, its turn in the worker, and its results."""
