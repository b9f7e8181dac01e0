"""Other trainers, a file each: what their hooks give, as rows of a store. No file imports its trainer at the top."""
