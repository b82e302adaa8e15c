"""verl's workers in layouts, through BytePS and through all-reduce."""
