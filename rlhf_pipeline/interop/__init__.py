"""Other libraries' shapes. Nothing here is imported by the rest of the package; the public names are its only door."""
