"""Trains with Megatron-LM and BytePS on a Ray cluster, and goes on when a machine is lost.

=================  ==================================================================
``settings``       what a job is
``layout``         how many ranks Megatron's arguments allow
``job``            the driver: incarnations one after the other, until training is done
``incarnation``    one life of the job: starts its processes, watches them, ends them
``servers``        scheduler and servers, which outlive ranks that fail
``pool``           the actors: ranks, spares, scheduler and servers
``rank_actor``     an actor that owns one rank's process
``byteps_actor``   an actor that owns one ``byteps-server`` process
``fork_server``    the process from which ranks are forked, all imports done
``memory``         training state in the memory of actors
``training_state`` a rank's whole training state, as Megatron describes it
``rank_program``   what runs in the rank's process, around the user's script
``failures``       what ended an incarnation, and who is to blame
``recovery``       where the state of the next one comes from: memory, or the checkpoint
``phases``         how long a recovery took, part by part
``metrics``        what Ray shows of the job
``profiling``      some steps of some ranks, as torch and BytePS see them
``traces``         timelines of both, made one file
``dispatch``       calls to a group of ranks, without a job
``workers``        the actors of such a group
``mesh``           ranks as a mesh
``strategies``     how such a call is cut over the mesh
``batches``        what is cut, and joined again
``places``         where ranks stand on their machines, and which GPU is theirs
``scraping``       where BytePS's metrics are, for Prometheus
``ports``          ports that nobody listens at
``reporting``      what a rank tells its actor; ``report`` is for scripts of any kind
=================  ==================================================================

Each incarnation's ranks are new processes, so that nothing of a failed one is left behind.
Scheduler and servers stay, unless the failure may have been theirs.
Driver and actors import neither torch nor Megatron.
"""

from __future__ import annotations

from .reporting import report

__all__ = ["report"]
