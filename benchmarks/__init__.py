"""What the published figures come from. Each module is a command: `python -m benchmarks.NAME --help`."""
