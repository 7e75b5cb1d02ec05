"""What clients send and get, as msgspec structs: decoding checks types and ranges, encoding costs microseconds."""
