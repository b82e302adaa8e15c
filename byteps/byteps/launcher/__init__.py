"""Starting the processes a job needs in addition to its workers."""
