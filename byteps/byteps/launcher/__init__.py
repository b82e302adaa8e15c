"""Starting the processes a job needs beside its workers."""
