"""One router per group of endpoints. A route reads the body, asks others to do the work, and shapes the answer."""
