"""The pages that show runs: a server on this machine's loopback address, and the same pages in one file."""
