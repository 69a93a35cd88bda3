"""Start commands of the other packages as Slurm jobs or local jobs, and restart them when they
fail.

The package imports only `fem_common`; torch is imported inside jobs only.

``launch submit`` describes a job once, in ``launch/job.json`` of the job's directory. From then on
the supervisor, which runs inside the job (``python -m launch.supervise``), decides from that file
and from the run's own files.
"""
