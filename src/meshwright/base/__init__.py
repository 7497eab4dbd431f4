"""Words, units and errors that every layer speaks; imports the standard library only."""
