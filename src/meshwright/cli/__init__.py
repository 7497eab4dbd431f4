"""The command line: one short file per command; everything heavy is imported inside the commands."""
