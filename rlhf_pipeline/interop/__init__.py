"""Interfaces of other libraries. The rest of the package does not import this; use the public names."""
