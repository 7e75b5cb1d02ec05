"""One file for each way of sharing the device."""
