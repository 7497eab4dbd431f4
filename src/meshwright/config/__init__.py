"""What the user wrote: the run file's schema, reading it, and resolving it with the origin of every value."""
