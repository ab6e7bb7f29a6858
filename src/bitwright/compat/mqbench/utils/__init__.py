"""MQBench's utilities: ``state`` switches quantizers."""
