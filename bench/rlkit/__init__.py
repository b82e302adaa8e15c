"""verl's workers in layouts of up to four ranks, through BytePS and through all-reduce."""
