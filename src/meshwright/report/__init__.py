"""What a person reads: terminal tables, pictures and one self-contained page. Takes dicts, needs no torch."""
