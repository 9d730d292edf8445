"""The command line that checks, times and compares the ports: `harness --help`."""
