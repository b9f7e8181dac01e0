"""The medium of immutable objects: one commit is one object, in a local folder or an object store."""
