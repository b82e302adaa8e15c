"""The process that warm pythons of tests are forked from."""

from tests.multiproc.programs.job import Job
from tests.warm_python import listen, serve


def serve_address(job: Job) -> None:
    """Serve at args' ``address``."""
    listener = listen(job.args["address"])
    job.mark("listens")
    serve(listener)
